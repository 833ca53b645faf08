"""`Pipeline`: a model, a schedule and a transport, ready to step.

A step cuts the batch, runs the program on every rank of this process, and has the loss on every rank.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from pipeloom.engine.batch import Batch
from pipeloom.engine.memory_use import MemoryUse
from pipeloom.engine.rank_state import LossFn, Record
from pipeloom.engine.result_exchange import total
from pipeloom.engine.worker import WarmUp
from pipeloom.errors import InputError
from pipeloom.ir import Action, Schedule
from pipeloom.parallel import DataParallel, Mesh, OffloadActivations, Precision
from pipeloom.parallel.axis import AxisSpan
from pipeloom.parallel.context import ContextKind
from pipeloom.parallel.context.attention_modules import check_dropout, with_dropout
from pipeloom.parallel.tensor.one_d.logits import full_logits
from pipeloom.plan.plan import Plan
from pipeloom.pretrained.saving import SHARD_BYTES, save
from pipeloom.training.argument_checks import check_trains
from pipeloom.training.construction import construct
from pipeloom.training.evaluation_mode import evaluation_mode
from pipeloom.training.generation.generate import Options, generate, prompt_of
from pipeloom.training.losses.own_loss import plain_batch, separated
from pipeloom.training.losses.watched_loss import tell
from pipeloom.training.model_check import ModelCheck
from pipeloom.training.observations import AuxiliaryValue, Observations
from pipeloom.training.plan_options import Model, PipelineOptions, options_of_plan
from pipeloom.training.stage_buffers import StageBuffers
from pipeloom.training.traced_modes import TracedModes
from pipeloom.transport.interface import Transport
from pipeloom.transport.values import Value, join_batch, with_form


class Pipeline:
    """A model that trains through a pipeline.

    Args:
        model: an nn.Sequential, a block model with `layers`, a list with one module per stage, or `Stages` that are cut
            already. Every rank passes the same model and keeps its own stages.
        schedule: the order of every rank's actions, for the micro-batches of one step. The `schedule` attribute is
            the one that runs: an I and the W behind it are merged into B where no rank waits for the I. Or a
            `pipeloom.Plan`, which also gives `cut`, `slices`, `recompute`, `offload`, `data`, `precision` and, for a
            data-parallel degree above 1, `mesh`; arguments must not contradict it.
        loss_fn: ``loss_fn(output, targets)`` of one micro-batch: a scalar, the mean over its samples, or a dict of this
            "loss" and of metrics to report (`metrics`), which are real numbers of the micro-batch. None: a model of
            transformers computes its own from labels in the batch, which is that of the batches of all replicas; for a
            mean over labels, `num_items_in_batch` in the batch replaces their number. `forward` needs none.
        layers, cut: how to cut `model`; see `pipeloom.split.split`. `cut` None: "layers"; of a traced model "time".
        example: inputs of one micro-batch, to trace a model whose layers are no chain; see `pipeloom.split.split`.
        transport: "auto", "loopback" (all ranks in this process, one after another), "threads" (all ranks in this
            process, one thread each), "shared-memory" (ranks are processes of one machine), "cuda-ipc" (the same on
            CUDA devices, which processes may share), "torch" (torch.distributed), or a `Transport` made for this rank,
            which the pipeline closes and whose own timeout applies to its messages. "auto" is loopback without a
            process group, else shared memory or CUDA IPC between ranks of one machine, and torch between all others.
        slices: the number of tokens of each slice, for a schedule with slices. Sequences of another length are cut in
            proportion. None: equal slices. Inputs and targets then hold sequences along dimension 1, and `loss_fn` is
            the mean over the tokens of a slice. Dropout masks do not depend on the lengths; a list of one length, for
            a schedule without slices, gives the same masks.
        recompute: what backwards recompute instead of saving it: "none", "selective" (attention) or "full" (every
            block), for all stages or one per stage. Losses and gradients stay bitwise the same. None: "none".
        offload: offloads activations between forward and backward, such as
            ``pipeloom.OffloadActivations("disk:/scratch")``.
        mesh: all processes: axis pp holds the stages of a replica, dp the replicas, cp the ranks that share sequences,
            tp those that share layers. None: one replica.
        data: how replicas share parameters, gradients and optimizer states: a `pipeloom.DataParallel` or the name of a
            strategy, "ddp" (the default) to "zero3". All replicas start from the parameters of the first.
        precision: a `pipeloom.Precision`, "bf16", "fp16" or "fp32" (the default, which leaves parameters as they are).
        context: how the ranks along axis cp of the mesh attend to each other's tokens: "ring" (the default: ring
            attention in zig-zag order), "ring-plain" (equal ranges), "ring-self-attention" or "ulysses"; see
            `pipeloom.parallel.context.ContextParallel`. Each passes the full batch, with sequences along dimension 1,
            and `loss_fn` is the mean over a rank's tokens. Inputs may be a dict with "attention_mask" (0 for padding)
            and "document_ids", both [samples, tokens].
        check: a small batch of inputs, or (inputs, targets): before training, the pipeline's outputs are compared with
            those of the model, in evaluation mode, and the weights of the models of all ranks; the first layer that
            differs is named. A loss_fn that would be a mean of means is reported. Every process passes it.
        compile: whether ``torch.compile`` compiles every block of the stages, or a stage without blocks as a whole.
        graphs: whether forwards and backwards are recorded as CUDA graphs in the third step and replayed in later ones,
            which saves the host's time per kernel. Every step then has the same shapes; stages and loss read no value
            on the host. Gradients stay in the same memory from step to step.
        blackbox: a writable buffer of 72 bytes: the label of the running action, then its start (time.perf_counter, a
            float64); such as that of a `pipeloom.Watchdog`.
        timeout_seconds: how long a rank waits for a message, or for replicas.

    Attributes:
        schedule: the schedule that runs.
        program: the program of `step`: the schedule with communication, gradient reduction and offload actions.
        mesh: as given.
        rank: the rank of this process; None where it holds all ranks.
        needs_inputs, needs_targets: whether this process holds the first stage, the last stage.
        state: the stages and parameters of this process: main parameters, their ranges and checkpoints.
        executor: runs the programs on the ranks of this process.
        observed: what the stages of this process declared in the last step.
        memory: memory held by this process, measured peaks, and offload traffic.

    The optimizer updates `parameters()`. They are the model's own parameters, with two exceptions: with shards or
    masters (`data`, `precision`), every run writes their values into the model's parameters; and where all ranks share
    this process, each higher rank has its own copy of a parameter that several ranks hold, as in a process of its own.
    Where this process is one rank, it sets the C library to keep freed memory, or with zero3 to return it to the
    system (see `pipeloom.processes.host_memory`).

    Raises:
        InputError: an illegal schedule, a pipeline that computes something else than the model (`check`), a model that
            cannot be cut this way, a process group of another size, or ranks with different programs.
    """

    def __init__(
        self,
        model: Model,
        schedule: Schedule | Plan,
        *,
        loss_fn: LossFn | None = None,
        layers: Sequence[str] | None = None,
        cut: str | Sequence[int] | Sequence[str] | None = None,
        example: Any = None,
        transport: str | Transport = "auto",
        slices: Sequence[int] | None = None,
        recompute: str | Sequence[str] | None = None,
        offload: OffloadActivations | None = None,
        mesh: Mesh | None = None,
        data: DataParallel | str | None = None,
        precision: Precision | str | None = None,
        context: ContextKind | None = None,
        check: Value = None,
        compile: bool = False,
        graphs: bool = False,
        blackbox: Any = None,
        timeout_seconds: float = 1800.0,
    ) -> None:
        options = PipelineOptions(cut, slices, recompute, offload, mesh, data, precision, context)
        if isinstance(schedule, Plan):
            options, schedule = options_of_plan(schedule, model, options), schedule.make_schedule()
        expected = None
        if check is not None:
            traced = example if layers is None else None
            expected = ModelCheck(model, check, schedule.num_microbatches, loss_fn, traced)
        self.state, self.executor, buffers = construct(
            model,
            schedule,
            options,
            loss_fn=loss_fn,
            layers=layers,
            example=example,
            transport=transport,
            compiles=compile,
            graphs=graphs,
            blackbox=blackbox,
            timeout_seconds=timeout_seconds,
        )
        self.program = self.executor.programs.train
        self.schedule, self.mesh = self.program.schedule, options.mesh
        self.rank = self.executor.connection.rank
        self.needs_inputs = 0 in self.state.stages
        self.needs_targets = self.schedule.num_stages - 1 in self.state.stages
        ranks = {rank: worker.state for rank, worker in self.executor.workers.items()}
        self.memory = MemoryUse(self.state.stores, ranks)
        self.observed = Observations(self.state, self.executor)
        self._buffers: StageBuffers | None = buffers  # until the first step
        self._trains = False  # whether `check_trains` has passed
        if expected is not None:
            self._compare(expected)
        self._dropouts = [] if self.executor.batching.parts is None else with_dropout(self.modules())
        self._modes = TracedModes(model, self.modules())

    def _compare(self, expected: ModelCheck) -> None:
        found: dict[str, Any] = {}
        stages = {stage: module for worker in self.executor.workers.values() for stage, module in worker.stages.items()}
        with self.executor.ended_by_errors(), evaluation_mode(self.modules()):
            with expected.watching(stages, found):
                output = self.forward(expected.inputs)
            connection = self.executor.connection
            expected.compare(output, found, connection.members, connection.own_replica)

    # Runs

    def step(self, inputs: Value = None, targets: Value = None) -> Tensor:
        """Forward and backward of one batch; gradients add to ``.grad`` as in plain accumulation.

        Args:
            inputs: the full batch, samples along dimension 0; read on the rank with the first stage. The model's first
                argument, or for a stage that runs a model's own forward a dict of its keyword arguments.
            targets: the full batch, read on the rank with the last stage. Without `loss_fn`, the labels of the batch,
                which is then read on the rank with the last stage too.

        Returns:
            The loss, the mean over all samples of the batch, on every rank; without a graph.

        Raises:
            InputError: no loss function, a batch smaller than the number of micro-batches, inputs missing or with a
                graph, or different values of one parameter on two ranks. Where one rank cannot use its batch, all
                ranks of all replicas raise, and can take the next step.
            StageError: the model or the loss raised. PeerLost: another rank ended.
        """
        return self.state.sharing.sum_losses(total(self._train(inputs, targets, share_losses=True)))

    def accumulate(
        self, inputs: Value = None, targets: Value = None, *, warm_up: WarmUp | None = None
    ) -> dict[int, Tensor]:
        """`step`, without waiting for the losses of other ranks.

        Args:
            inputs, targets: as for `step`.
            warm_up: see `pipeloom.engine.executor.Executor.run`.

        Returns:
            By micro-batch, the losses known to this process, each times its share of the batch.
            `pipeloom.engine.result_exchange.total` adds up those of all ranks to the loss of the step.
        """
        return self._train(inputs, targets, share_losses=False, warm_up=warm_up)

    def _train(
        self, inputs: Value, targets: Value, *, share_losses: bool, warm_up: WarmUp | None = None
    ) -> dict[int, Tensor]:
        if not self._trains or not torch.is_grad_enabled():
            check_trains(self.schedule, self.executor.batching.loss_fn)
            self._trains = True
        check_dropout(self._dropouts)
        self._modes.check()
        if self.state.has_copies and warm_up is None:  # before its validation, ranks may still differ
            self.state.check_equal()
        self._begin()
        run = self.executor.run(
            lambda: self._separated(inputs, targets),
            training=True,
            with_loss=True,
            share_results=share_losses,
            warm_up=warm_up,
        )
        self._took(run)
        with self.executor.ended_by_errors():
            if self._buffers is not None:
                self._buffers.check()
                self._buffers = None
            self.observed.call_listeners()
        return run.losses

    def evaluate(self, inputs: Value = None, targets: Value = None) -> Tensor:
        """The loss of one batch in evaluation mode, on every rank; gradients and modes stay.

        A batch of fewer samples than micro-batches runs in one micro-batch per sample, as in `forward`.

        Raises:
            InputError: no loss function, or a rank cannot use its batch; all ranks raise.
        """
        if self.executor.batching.loss_fn is None:
            raise InputError("evaluate() needs a loss: pass loss_fn to Pipeline.")
        with evaluation_mode(self.modules()):
            batch = self._evaluate(lambda: self._separated(inputs, targets), with_loss=True)
            return self.state.sharing.sum_losses(total(batch.losses))

    def _separated(self, inputs: Value, targets: Value) -> tuple[Value, Value]:
        return separated(self.executor.batching.loss_fn, inputs, targets, needs_targets=self.needs_targets)

    def forward(self, inputs: Value = None) -> Value:
        """The model's output for a batch, on the ranks with the last stage; None elsewhere. Modes stay as set.

        Every process calls it, also of other replicas. Batches of replicas may have different sizes; all run as many
        micro-batches as the smallest has samples, at most those of a step. Outputs of context-parallel ranks are
        gathered to whole sequences, logits of tensor-parallel ranks to the whole vocabulary.

        Args:
            inputs: the full batch of one sample or more; read on the rank with the first stage.

        Raises:
            InputError: a rank cannot use its batch; all ranks raise.
        """
        batch = self._evaluate(lambda: (plain_batch(inputs), None), with_loss=False)
        if not batch.outputs:
            return None
        outputs = [batch.outputs[b] for b in sorted(batch.outputs)]
        output = full_logits(join_batch(outputs))
        parts = self.executor.batching.parts
        return with_form(output if parts is None else parts.join(output), outputs[0])

    def generate(
        self,
        input_ids: Value = None,
        *,
        max_new_tokens: int | None = None,
        max_length: int | None = None,
        attention_mask: Tensor | None = None,
        do_sample: bool | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        eos_token_id: int | list[int] | None = None,
        pad_token_id: int | None = None,
        seed: int | None = None,
        generator: torch.Generator | None = None,
        pad_to_multiple_of: int = 1,
        **more: Any,
    ) -> Tensor:
        """Continue sequences of tokens, greedily or by sampling; every process calls it, with the same arguments.

        Stages keep the keys and values of earlier tokens. A model of transformers uses its own generation configuration
        for what is None, its own logits processors and caches: tokens are those of the model's own ``generate``. Other
        models map token ids [B, S] to logits [B, S, V].

        Args:
            input_ids: prompts, [samples, tokens], one sample or more; or a dict with them and "attention_mask", such as
                a `BatchEncoding`. Read on the rank with the first stage.
            max_new_tokens: the most new tokens per sequence.
            max_length: the most tokens per sequence, prompts included; `max_new_tokens` goes before it. If both are
                None, the generation configuration says; its default is 20 new tokens.
            attention_mask: 0 for padding, which is on the left; for models of transformers.
            do_sample: whether to draw tokens instead of taking the likeliest.
            temperature, top_k, top_p: of sampling: divide logits, keep the likeliest tokens.
            eos_token_id: one or several tokens that end a sequence.
            pad_token_id: what follows an end.
            seed, generator: of the draws; tokens do not depend on the schedule. None: torch's default generator on the
                rank with the last stage.
            pad_to_multiple_of: for models not of transformers whose stages share out the tokens of a forward (slices,
                context and sequence parallelism): whole sequences run for every token, padded on the right to such
                a length, and every process passes `input_ids`.
            more: further arguments of the ``generate`` of transformers, such as `repetition_penalty`.

        Returns:
            Prompts and new tokens, int64 [samples, tokens], on every process.

        Raises:
            InputError: an invalid argument, or a model, schedule or mesh that cannot generate; on all ranks.
        """
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
        chosen = (do_sample, temperature, top_k, top_p)
        options = Options(max_new_tokens, max_length, *chosen, eos_token_id, pad_token_id, pad_to_multiple_of, more)
        self._begin()
        prompt = partial(prompt_of, plain_batch(input_ids), attention_mask)
        return generate(self.state, self.executor, self.forward, prompt, options, generator)

    def _evaluate(self, read: Callable[[], tuple[Value, Value]], *, with_loss: bool) -> Batch:
        self._begin()
        with torch.no_grad():
            batch = self.executor.run(read, training=False, with_loss=with_loss)
        if with_loss:
            self._took(batch)
        return batch

    def _took(self, batch: Batch) -> None:
        """A batch has run with its loss."""
        self.observed.take(batch)
        tell(self.executor.batching.loss_fn)

    def _begin(self) -> None:
        self.state.check_around()
        if self.mesh is not None:
            self.mesh.meter.begin()

    def auxiliary_losses(self) -> dict[str, dict[str, AuxiliaryValue]]:
        """The auxiliary losses of the last step or evaluation, by layer and name, on every rank.

        A value is the mean over all samples of all replicas. The first call after a step is made by every process.
        """
        return self.observed.gather().losses

    def observations(self) -> dict[str, dict[str, Tensor]]:
        """The quantities that `pipeloom.observe` reported in the last step or evaluation, by layer and name.

        Each is the sum over the micro-batches, slices and replicas, in float64, on every rank: 0 where an earlier step
        alone reported it. The first call after a step is made by every process.

        Raises:
            RunError: quantities of one name in one layer have different shapes.
        """
        return self.observed.gather().quantities

    def metrics(self) -> dict[str, float]:
        """The metrics that `loss_fn` returned beside the loss in the last step or evaluation, by name, on every rank.

        A value is the mean over all micro-batches, slices and replicas, weighted as the loss is; a `pipeloom.Sum` their
        sum, a `pipeloom.Mean` their mean with its own weights. The first call after a step is made by every process.
        """
        return self.observed.gather().metrics

    @property
    def records(self) -> list[tuple[int, list[Record]]]:
        """For each rank of this process, the actions of the last run with start and end (perf_counter seconds).

        Gathers, reductions over replicas and offload transfers come last, one record per unit of a stage.
        """
        return [(rank, list(records())) for rank, records in self.executor.last_run.items()]

    @property
    def waits(self) -> dict[int, dict[Action, float]]:
        """For each rank of this process, the seconds that actions of the last run waited for overlapped work:
        gathering parameters, reducing gradients, moving offloaded activations.
        """
        return {rank: worker.overlap.waits for rank, worker in self.executor.workers.items()}

    @property
    def processor_seconds(self) -> dict[int, dict[Action, float]]:
        """For each rank of this process, the processor seconds of the computations of the last step, of the thread that
        runs the rank: less than their time in `records` where they wait or other programs use the core. Empty on GPUs,
        and in streams.
        """
        workers = self.executor.workers.items()
        return {rank: {action: cell[0] for action, cell in each.processor_seconds.items()} for rank, each in workers}

    @property
    def threads(self) -> dict[int, int]:
        """For each rank of this process, the native number of the thread that ran its last step."""
        return {rank: worker.thread for rank, worker in self.executor.workers.items()}

    @property
    def collectives(self) -> list[tuple[int, list[AxisSpan]]]:
        """For each rank of this process, the collectives of the last run along axes inside its stages, in order.

        Each has its axis, its name, start and end (perf_counter seconds, as in `records`), and the bytes sent.
        """
        return [(rank, list(self.mesh.meter.spans) if self.mesh else []) for rank in self.executor.last_run]

    # The model

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters that this process's optimizer updates."""
        return (parameter for _, parameter in self.state.named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names in the uncut model and parameters, in the model's order; see `ModelState.named_parameters`."""
        return self.state.named_parameters()

    def modules(self) -> Iterator[nn.Module]:
        """The stage modules of all ranks of this process."""
        return self.state.modules()

    def train(self, mode: bool = True) -> Self:
        """Set the training mode of all stages held here."""
        for module in self.modules():
            module.train(mode)
        return self

    def eval(self) -> Self:
        """Set the evaluation mode of all stages held here."""
        return self.train(False)

    def state_dict(self) -> dict[str, Any]:
        """Full parameters and persistent buffers held here, by their names in the uncut model.

        All ranks of one replica together have the model's own ``state_dict()``. With shards or masters (`data`,
        `precision`), or several tensor-parallel ranks, every process calls this, since values are gathered; see
        `ModelState.state_dict`.
        """
        return self.state.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy values of the uncut model's ``state_dict()`` into everything held here, in place.

        Raises:
            InputError: see `ModelState.load_state_dict`.
        """
        self.state.load_state_dict(state)

    def save_pretrained(
        self,
        directory: str | PathLike[str],
        tokenizer: Any = None,
        *,
        max_shard_bytes: int = SHARD_BYTES,
        dtype: torch.dtype | None = None,
        overwrite: bool = False,
    ) -> Path:
        """Write a model of transformers as a directory that its `from_pretrained` reads. Every process calls it.

        Each process writes its own tensors, gathered one after another where processes share them, under the names that
        transformers saves. The directory has its name once it is complete.

        Args:
            directory: a new or empty directory, on a file system that all processes share.
            tokenizer: or processor, or a list of these, whose files are written too.
            max_shard_bytes: of one safetensors file.
            dtype: of the saved floating-point tensors; None: that of the main parameters.
            overwrite: whether the directory of another model, which has a config.json, is replaced as a whole.

        Returns:
            The directory.

        Raises:
            InputError: another model than one of transformers, or processes that pass different arguments.
            CheckpointError: the directory has other files, or a process failed. All are raised on every process.
        """
        return save(
            self.state,
            self.executor.connection.members,
            directory,
            tokenizer=tokenizer,
            max_shard_bytes=max_shard_bytes,
            dtype=dtype,
            overwrite=overwrite,
        )

    @property
    def loss_scale(self) -> float:
        """The factor of losses before their backward, for fp16; main gradients are divided by it.

        Raises:
            InputError: on setting it where gradients have 32 bits or more.
        """
        return next(iter(self.state.stores.values())).loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        axis = self.state.sharing.axis
        if scale != 1.0 and not (axis and axis.separate_master):
            raise InputError(
                f"loss_scale={scale}: only 16-bit gradients are scaled. Pass precision='fp16' to Pipeline."
            )
        for store in self.state.stores.values():
            store.loss_scale = scale

    def close(self) -> None:
        """Close the channels. Closing twice does nothing.

        The parameters stay usable, except under zero3: there only `state_dict` still has them in full.
        """
        self.executor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and self.executor.ended is None:
            self.executor.settle()
        self.close()
