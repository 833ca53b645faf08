"""`Pipeline`: a model, a schedule and a transport, ready to step.

every rank:   check arguments -> split -> programs -> connect -> own stages -> executor
a step:       cut the batch -> run the program on every rank of this process -> loss on every rank
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from pipeloom.engine.binders.sequence_slices import cut_sequences
from pipeloom.engine.executor import Executor, Programs
from pipeloom.engine.instructions import Record
from pipeloom.engine.model_state import ModelState
from pipeloom.engine.rank_state import Batch, LossFn
from pipeloom.engine.result_exchange import total
from pipeloom.engine.worker import WarmUp
from pipeloom.errors import InputError
from pipeloom.ir import Action, Program, Schedule
from pipeloom.parallel.data.sharing import share
from pipeloom.parallel.mesh import Mesh
from pipeloom.parallel.offload.activations import open_activation_offload
from pipeloom.parallel.options import DataParallel, OffloadActivations, Precision
from pipeloom.passes import merge_backwards, separate_units
from pipeloom.plan.plan import Plan
from pipeloom.processes.agreement import RunFingerprint
from pipeloom.processes.host_memory import give_back_freed_memory, keep_freed_memory
from pipeloom.slicing import make_sliceable
from pipeloom.split import Stages, split
from pipeloom.training.argument_checks import (
    can_train,
    check_arguments,
    check_num_stages,
    check_recompute,
    check_trains,
)
from pipeloom.training.memory_use import MemoryUse
from pipeloom.training.plan_arguments import arguments_of_plan
from pipeloom.transport.connect import connect
from pipeloom.transport.interface import Transport
from pipeloom.transport.values import Value, join_batch


class Pipeline:
    """A model that trains through a pipeline.

    Args:
        model: an nn.Sequential, a block model with `layers`, a list with one module per stage, or `Stages` that are cut
            already. Every rank passes the same model and keeps its own stages.
        schedule: the order of every rank's actions, for the micro-batches of one step. The `schedule` attribute is
            the one that runs: an I and the W behind it are merged into B where no rank waits for the I. Or a
            `pipeloom.Plan`, which also gives `cut`, `slices`, `recompute`, `offload`, `data`, `precision` and, for a
            data-parallel degree above 1, `mesh`; arguments must not contradict it.
        loss_fn: ``loss_fn(output, targets)`` of one micro-batch: a scalar, the mean over its samples. `forward` needs
            none.
        layers, cut: how to cut `model`; see `pipeloom.split.split`.
        transport: "auto", "loopback" (all ranks in this process, one after another), "threads" (all ranks in this
            process, one thread each), "shared-memory" (ranks are processes of one machine), "torch"
            (torch.distributed), or a `Transport` made for this rank, which the pipeline closes and whose own timeout
            applies to its messages. "auto" is loopback without a process group, else shared memory between CPU ranks of
            one machine and torch between all others.
        slices: the number of tokens of each slice, for a schedule with slices. Sequences of another length are cut in
            proportion. None: equal slices. Inputs and targets then hold sequences along dimension 1, and `loss_fn` is
            the mean over the tokens of a slice. Dropout masks do not depend on the lengths; a list of one length, for
            a schedule without slices, gives the same masks.
        recompute: what backwards recompute instead of saving it: "none", "selective" (attention) or "full" (every
            block), for all stages or one per stage. Losses and gradients stay bitwise the same.
        offload: offloads activations between forward and backward, such as
            ``pipeloom.OffloadActivations("disk:/scratch")``.
        mesh: the processes of all data-parallel replicas: axis pp holds the ranks of one replica, axis dp the replicas.
            None: one replica.
        data: how replicas share parameters, gradients and optimizer states: a `pipeloom.DataParallel` or the name of a
            strategy, "ddp" (the default) to "zero3". All replicas start from the parameters of the first.
        precision: number formats: a `pipeloom.Precision`, or "bf16", "fp16" or "fp32" (the default, which leaves the
            model's parameters as they are).
        blackbox: a writable buffer of 64 bytes for the label of the running action.
        timeout_seconds: how long a rank waits for a message, or for other replicas.

    Attributes:
        schedule: the schedule that runs.
        mesh: as given.
        state: the stages and parameters of this process: main parameters, their ranges and checkpoints.
        executor: runs the programs on the ranks of this process.
        memory: memory held by this process, measured peaks, and offload traffic.

    The optimizer updates `parameters()`. They are the model's own parameters, with two exceptions: with shards or
    masters (`data`, `precision`), every run writes their values into the model's parameters; and where all ranks share
    this process, each higher rank has its own copy of a parameter that several ranks hold, as in a process of its own.
    Where this process is one rank, it sets the C library to keep freed memory, or with zero3 to return it to the
    system (see `pipeloom.processes.host_memory`).

    Raises:
        InputError: an illegal schedule, a model that cannot be cut this way, a process group of another size, or ranks
            with different programs.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module] | Stages,
        schedule: Schedule | Plan,
        *,
        loss_fn: LossFn | None = None,
        layers: Sequence[str] | None = None,
        cut: str | Sequence[int] = "layers",
        transport: str | Transport = "auto",
        slices: Sequence[int] | None = None,
        recompute: str | Sequence[str] = "none",
        offload: OffloadActivations | None = None,
        mesh: Mesh | None = None,
        data: DataParallel | str | None = None,
        precision: Precision | str | None = None,
        blackbox: Any = None,
        timeout_seconds: float = 1800.0,
    ) -> None:
        if isinstance(schedule, Plan):
            schedule, cut, slices, recompute, offload, mesh, data, precision = arguments_of_plan(
                schedule,
                model,
                cut=cut,
                slices=slices,
                recompute=recompute,
                offload=offload,
                mesh=mesh,
                data=data,
                precision=precision,
            )
        check_arguments(schedule, loss_fn, slices, offload, mesh, timeout_seconds)
        schedule = separate_units(merge_backwards(schedule))
        self.schedule, self.mesh = schedule, mesh
        self._trains = can_train(schedule, loss_fn)
        self._sliced, self._slice_lengths = schedule.num_slices > 1 or slices is not None, slices

        stages = model if isinstance(model, Stages) else split(model, schedule.num_stages, layers=layers, cut=cut)
        check_num_stages(stages, schedule)
        is_cut = not isinstance(model, nn.Module | Stages)  # a list may hold placeholders for stages of other ranks
        kinds = check_recompute(recompute, schedule, transport, () if is_cut else stages.modules)
        for module in stages.modules if self._sliced else ():
            make_sliceable(module)

        sharing = share(mesh, data, precision, timeout_seconds)
        tied = [parameter.stages for parameter in stages.tied]
        programs = Programs.of(schedule, tied, sharing.axis, None if offload is None else offload.insert)

        device = next((p.device for module in stages.modules for p in module.parameters()), torch.device("cpu"))
        sharing.check_device(device)
        open_mover = open_activation_offload(offload, device) if offload is not None else lambda: None
        fingerprint = RunFingerprint.of(programs.train, () if is_cut else stages.layers, slices, sharing.terms)
        connection = connect(
            schedule.num_ranks,
            transport,
            timeout_seconds,
            fingerprint,
            replicas=None if mesh is None else mesh.lines("pp"),
            group=None if mesh is None else mesh.cpu_group,
        )
        if connection.rank is not None:
            frees = sharing.axis is not None and sharing.axis.shards_parameters
            give_back_freed_memory() if frees else keep_freed_memory()

        ranks = range(schedule.num_ranks) if connection.rank is None else [connection.rank]
        self.state = ModelState(stages, programs.train, ranks, sharing)
        self.executor = Executor(
            self.state,
            programs,
            connection,
            loss_fn=loss_fn,
            sliced=self._sliced,
            recompute=kinds,
            open_mover=open_mover,
            blackbox=blackbox,
        )
        self.memory = MemoryUse(self.state, self.executor)

    @property
    def program(self) -> Program:
        """The program of `step`: the schedule with communication, gradient reduction and offload actions."""
        return self.executor.programs.train

    @property
    def rank(self) -> int | None:
        """The rank of this process; None where it holds all ranks."""
        return self.executor.connection.rank

    @property
    def needs_inputs(self) -> bool:
        """Whether this process holds the first stage."""
        return 0 in self.state.stages

    @property
    def needs_targets(self) -> bool:
        """Whether this process holds the last stage."""
        return self.schedule.num_stages - 1 in self.state.stages

    # Runs

    def step(self, inputs: Value = None, targets: Value = None) -> Tensor:
        """Forward and backward of one batch; gradients add to ``.grad`` as in plain accumulation.

        Args:
            inputs: the full batch, samples along dimension 0; read on the rank with the first stage.
            targets: the full batch, read on the rank with the last stage.

        Returns:
            The loss, the mean over all samples of the batch, on every rank; without a graph.

        Raises:
            InputError: no loss function, a batch smaller than the number of micro-batches, inputs missing or with a
                graph, or different values of one parameter on two ranks.
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
            check_trains(self.schedule, self.executor.loss_fn)
        if self.state.has_copies and warm_up is None:  # before its validation, ranks may still differ
            self.state.check_equal()
        batch = self._cut(self.program, inputs, targets, with_loss=True)
        self.executor.run(self.program, batch, with_loss=True, share_results=share_losses, warm_up=warm_up)
        return batch.losses

    def evaluate(self, inputs: Value = None, targets: Value = None) -> Tensor:
        """The loss of one batch in evaluation mode, on every rank; gradients and modes stay as they are."""
        if self.executor.loss_fn is None:
            raise InputError("evaluate() needs a loss: pass loss_fn to Pipeline.")
        modes = [(module, module.training) for stage in self.modules() for module in stage.modules()]
        self.eval()
        try:
            return self.state.sharing.sum_losses(total(self._evaluate(inputs, targets, with_loss=True).losses))
        finally:
            for module, training in modes:  # parents first; a module may do more in train() than set the flag
                if module.training != training:
                    module.train(training)
            for module, training in modes:
                module.training = training

    def forward(self, inputs: Value = None) -> Value:
        """The model's output for a batch, on the ranks with the last stage; None elsewhere. Modes stay as set."""
        batch = self._evaluate(inputs, None, with_loss=False)
        return join_batch([batch.outputs[b] for b in sorted(batch.outputs)]) if batch.outputs else None

    def _evaluate(self, inputs: Value, targets: Value, *, with_loss: bool) -> Batch:
        program = self.executor.programs.forward
        with torch.no_grad():
            batch = self._cut(program, inputs, targets, with_loss=with_loss)
            self.executor.run(program, batch, with_loss=with_loss)
        return batch

    def _cut(self, program: Program, inputs: Value, targets: Value, *, with_loss: bool) -> Batch:
        """The micro-batches of this replica, weighted by all replicas' samples.

        Where one replica's batch is invalid, all replicas raise.
        """
        self.executor.check_free()
        needs_targets = self.needs_targets and with_loss
        batch = Batch()
        refusal: Exception | None = None
        sharing = self.state.sharing
        try:
            batch = Batch.cut(
                program.schedule.num_microbatches,
                sharing.inputs(inputs),
                targets,
                needs_inputs=self.needs_inputs,
                needs_targets=needs_targets,
            )
            if self._sliced:
                cut_sequences(batch, self.schedule.num_slices, self._slice_lengths)
        except Exception as error:
            refusal = error
        # With several replicas, the ranks with the last stage exchange the error. Other ranks may already run: closing
        # the transport ends them. With one replica, this rank may call again.
        has_processes = self.rank is not None and self.schedule.num_ranks > 1
        has_replicas = sharing.axis is not None and sharing.axis.degree > 1
        with self.executor.ended_by_errors() if has_processes and has_replicas else nullcontext():
            if needs_targets:
                batch.weigh(sharing.sum_samples(batch.num_samples, refusal))
            elif refusal is not None:
                raise refusal
        if self._sliced and not program.schedule.forward_only:
            batch.seed = int(torch.randint(2**63 - 1, ()))
        return batch

    @property
    def records(self) -> list[tuple[int, list[Record]]]:
        """For each rank of this process, the actions of the last run with start and end (perf_counter seconds).

        Gathers, reductions over replicas and offload transfers come last, with their own start and end: one record per
        unit of a stage.
        """
        return [(rank, list(records())) for rank, records in self.executor.last_run.items()]

    @property
    def waits(self) -> dict[int, dict[Action, float]]:
        """For each rank of this process, the seconds that actions of the last run waited for overlapped work.

        Overlapped work is gathering parameters, reducing gradients, and moving offloaded activations.
        """
        return {rank: worker.overlap.waits for rank, worker in self.executor.workers.items()}

    # The model

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters that this process's optimizer updates."""
        for _, parameter in self.state.named_parameters():
            yield parameter

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names in the uncut model and parameters, in the model's order; see `ModelState.named_parameters`."""
        return self.state.named_parameters()

    def modules(self) -> Iterator[nn.Module]:
        """The stage modules of all ranks of this process."""
        return self.state.modules()

    def train(self, mode: bool = True) -> Self:
        """Set the training mode of all stages held here."""
        self.state.train(mode)
        return self

    def eval(self) -> Self:
        """Set the evaluation mode of all stages held here."""
        return self.train(False)

    def state_dict(self) -> dict[str, Any]:
        """Full parameters and persistent buffers held here, by their names in the uncut model.

        All ranks of one replica together have the model's own ``state_dict()``. With shards or masters (`data`,
        `precision`) every process calls this, since values are gathered; see `ModelState.state_dict`.
        """
        return self.state.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy values of the uncut model's ``state_dict()`` into everything held here, in place.

        Raises:
            InputError: see `ModelState.load_state_dict`.
        """
        self.state.load_state_dict(state)

    @property
    def loss_scale(self) -> float:
        """The factor by which losses are multiplied before their backward, for fp16; main gradients are divided by it.

        Where it is too large, gradients and their norm are not finite.

        Raises:
            InputError: on setting it where gradients have 32 bits or more.
        """
        return self.state.loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        self.state.loss_scale = scale

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
