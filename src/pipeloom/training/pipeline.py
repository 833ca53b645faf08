"""`Pipeline`: a model, a schedule and a transport, ready to step.

every rank:   split -> own stages -> bind programs (step, evaluate, forward) -> run -> loss on every rank
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.engine.binders.activation_offload import OffloadOptions
from pipeloom.engine.binders.sequence_slices import cut_sequences
from pipeloom.engine.lowered_programs import Programs
from pipeloom.engine.rank_state import Batch, LossFn
from pipeloom.engine.result_exchange import total
from pipeloom.engine.stores.parameter_store import sharing_of
from pipeloom.errors import InputError
from pipeloom.ir import Program, Schedule
from pipeloom.passes import check_has_backwards, merge_backwards, separate_units
from pipeloom.processes.agreement import RunFingerprint
from pipeloom.processes.collectives import all_reduce
from pipeloom.processes.process_mesh import ProcessMesh
from pipeloom.slicing import make_sliceable
from pipeloom.split import Stages, split
from pipeloom.training.argument_checks import (
    check_attention,
    check_loss,
    check_recompute,
    check_runnable,
    check_slices,
    check_surroundings,
)
from pipeloom.training.executor import Executor
from pipeloom.transport.connect import connect
from pipeloom.transport.interface import Transport
from pipeloom.transport.values import Value, join_batch


class Pipeline(Executor):
    """A model that trains through a pipeline.

    Args:
        model: an nn.Sequential, a block model with `layers`, a list of modules (one a stage), or `Stages` already cut.
            Every rank passes the same model and keeps its own stages.
        schedule: who computes what in which order; its micro-batches are those of every step. What runs, the
            `schedule` attribute, has B for an I and W that stand together where no other rank waits for the I.
        loss_fn: ``loss_fn(output, targets)`` of one micro-batch: a scalar, the mean over its samples. Not needed for
            `forward` alone.
        layers, cut: how to cut `model`; see `pipeloom.split.split`.
        transport: "auto", "loopback" (all ranks in this process, one after another), "threads" (all ranks in this
            process, one thread each), "shared-memory" (ranks are processes of one machine), "torch"
            (torch.distributed), or a `Transport`. "auto" is shared memory between CPU ranks of one machine and torch
            between all others where a process group exists, and loopback where none does.
        slices: where the schedule has slices, how many tokens each has; sequences of another length are cut in
            proportion. None: evenly. Inputs and targets then hold sequences along dimension 1, and `loss_fn` is the
            mean over the tokens of a slice. Dropout masks do not depend on the lengths; one length, for a schedule
            without slices, gives the same ones.
        recompute: what backwards compute again instead of keeping it: "none", "selective" (attention) or "full" (every
            block), for all stages or one word a stage. Losses and gradients are those without, to the last bit.
        offload: moves activations to memory of the host or to a file between forward and backward, such as
            ``pipeloom.parallel.OffloadActivations("disk:/scratch")``.
        mesh: where copies of the pipeline share the work: its axis pp holds the ranks of one copy, each process a
            rank, and its axis dp the copies. None: one copy.
        data: what copies keep of parameters, gradients and optimizer states: a `pipeloom.DataParallel` or the name of
            a strategy, "ddp" (the default) to "zero3". Copies start from the parameters of the first.
        precision: number formats: a `pipeloom.Precision`, or "bf16", "fp16" or "fp32" (the default), with which
            parameters are what the model has.
        blackbox: a writable buffer of 64 bytes into which the label of the running action is written.
        timeout_seconds: how long a rank may wait for a message, or for other copies.

    The model stays as it is, and its parameters are the ones that train; but with shards or masters (`data`,
    `precision`), which every run puts into the model's parameters anew. And where all ranks share this process, of
    parameters that several ranks hold each higher rank has a copy, as in a process of its own: make the optimizer from
    `parameters`. Where this process is one rank, the C library is told to keep freed memory, with zero3 to give it back
    (see `pipeloom.processes.host_memory`).

    Raises:
        InputError: illegal schedule, a model that cannot be cut so, a process group of another size, ranks that are
            about to run different things.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module] | Stages,
        schedule: Schedule,
        *,
        loss_fn: LossFn | None = None,
        layers: Sequence[str] | None = None,
        cut: str | Sequence[int] = "layers",
        transport: str | Transport = "auto",
        slices: Sequence[int] | None = None,
        recompute: str | Sequence[str] = "none",
        offload: OffloadOptions | None = None,
        mesh: ProcessMesh | None = None,
        data: Any = None,
        precision: Any = None,
        blackbox: Any = None,
        timeout_seconds: float = 1800.0,
    ) -> None:
        check_runnable(schedule)
        check_loss(loss_fn)
        check_surroundings(offload, mesh, timeout_seconds)
        check_slices(schedule, slices)
        schedule = separate_units(merge_backwards(schedule))
        cut_model = model if isinstance(model, Stages) else split(model, schedule.num_stages, layers=layers, cut=cut)
        if len(cut_model.modules) != schedule.num_stages:
            raise InputError(
                f"a model of {len(cut_model.modules)} stages for a schedule of {schedule.num_stages}: the numbers "
                f"must be equal; cut the model into {schedule.num_stages}"
            )
        self.schedule = schedule
        kinds = check_recompute(recompute, schedule.num_stages, transport)
        self._sliced, self._slice_lengths = schedule.num_slices > 1 or slices is not None, slices
        if self._sliced:
            for module in cut_model.modules:
                make_sliceable(module)
        sharing = sharing_of(mesh, data, precision, timeout_seconds)
        tied_stages = [parameter.stages for parameter in cut_model.tied]
        programs = Programs.of(schedule, tied_stages, sharing, offload)
        given = not isinstance(model, nn.Module | Stages)  # a list of stages may hold a dummy for those of other ranks
        if not given:
            check_attention(cut_model.modules, kinds)
        terms = RunFingerprint.of(programs.train, () if given else cut_model.layers, slices, sharing.terms)
        self._loss_fn, self._timeout_seconds = loss_fn, timeout_seconds
        device = next((p.device for module in cut_model.modules for p in module.parameters()), torch.device("cpu"))
        sharing.check_device(device)
        open_mover = offload.open(device) if offload is not None else lambda: None
        self.mesh = mesh
        super().__init__(
            cut_model,
            programs,
            connect(schedule.num_ranks, transport, timeout_seconds, terms, mesh),
            sharing,
            loss_fn=loss_fn,
            sliced=self._sliced,
            recompute=kinds,
            open_mover=open_mover,
            blackbox=blackbox,
        )

    @property
    def has_loss(self) -> bool:
        """Whether it can train."""
        return self._loss_fn is not None

    @property
    def needs_inputs(self) -> bool:
        """Whether this process holds the first stage."""
        return 0 in self.stages

    @property
    def needs_targets(self) -> bool:
        """Whether this process holds the last stage."""
        return self.schedule.num_stages - 1 in self.stages

    # What it does

    def step(self, inputs: Value = None, targets: Value = None) -> Tensor:
        """Forward and backward of one batch; gradients add to ``.grad`` as in plain accumulation.

        Args:
            inputs: the whole batch, samples along dimension 0; read on the rank with the first stage.
            targets: likewise, read on the rank with the last stage.

        Returns:
            The loss, the mean over all samples of the batch, on every rank; without a graph.

        Raises:
            InputError: no loss function, a batch smaller than the number of micro-batches, inputs missing or with a
                graph behind them, copies of a parameter that differ.
            StageError: the model or the loss raised. PeerLost: another rank ended.
        """
        return self.sharing.sum_losses(total(self._train(inputs, targets, share_losses=True)))

    def accumulate(self, inputs: Value = None, targets: Value = None) -> dict[int, Tensor]:
        """`step` that does not wait for the losses of other ranks.

        Returns:
            By micro-batch, the losses that are known here, those of the last stage's ranks, each times its share of
            the batch. `pipeloom.engine.result_exchange.total` makes the step's loss of all of them.
        """
        return self._train(inputs, targets, share_losses=False)

    def _train(self, inputs: Value, targets: Value, *, share_losses: bool) -> dict[int, Tensor]:
        if self._loss_fn is None:
            raise InputError("step() on a Pipeline without loss_fn: a step needs a loss; pass loss_fn to Pipeline")
        if self.schedule.microbatches_per_update is not None:
            raise InputError(
                f"step() under schedule {self.schedule.name!r}: its updates are part of the stream; give the pipeline "
                "and the optimizer to pipeloom.Stream and call its run()"
            )
        check_has_backwards(self.schedule)
        if not torch.is_grad_enabled():
            raise InputError("step() where gradients are switched off: it computes them; leave torch.no_grad() first")
        if self._speculation is None:  # else ranks of this process may disagree for a while
            self.check_equal()
        return self._call(self._programs.train, inputs, targets, with_loss=True, share_losses=share_losses).losses

    def evaluate(self, inputs: Value = None, targets: Value = None) -> Tensor:
        """The loss of one batch in evaluation mode, on every rank; gradients and modes stay as they are."""
        if self._loss_fn is None:
            raise InputError("evaluate() on a Pipeline without loss_fn: it returns a loss; pass loss_fn to Pipeline")
        modes = [(module, module.training) for stage in self.modules() for module in stage.modules()]
        self.eval()
        try:
            with torch.no_grad():
                batch = self._call(self._programs.forward, inputs, targets, with_loss=True)
                return self.sharing.sum_losses(total(batch.losses))
        finally:
            for module, training in modes:  # parents first; a module may do more in train() than set the flag
                if module.training != training:
                    module.train(training)
            for module, training in modes:
                module.training = training

    def forward(self, inputs: Value = None) -> Value:
        """The model's output for a batch, on the ranks with the last stage; None elsewhere. Modes stay as set."""
        with torch.no_grad():
            batch = self._call(self._programs.forward, inputs, None, with_loss=False)
        return join_batch([batch.outputs[b] for b in sorted(batch.outputs)]) if batch.outputs else None

    def sum_over_processes(self, values: Tensor) -> Tensor:
        """The sum over the processes of all ranks and copies, in place; a small tensor on the CPU.

        Raises:
            PeerLost: one of them went away, or did not come in time.
        """
        if self.process_group is None:
            return values
        return all_reduce(values, self.process_group, self._timeout_seconds)

    def _call(
        self, program: Program, inputs: Value, targets: Value, *, with_loss: bool, share_losses: bool = True
    ) -> Batch:
        """Run `program` on a batch, and return that with the results."""
        self.driver.check_free()
        batch = self._cut(program, inputs, targets, needs_targets=self.needs_targets and with_loss)
        if self._sliced:
            batch.seed = None if program.schedule.forward_only else int(torch.randint(2**63 - 1, ()))
        self._run(program, batch, with_loss=with_loss, share=share_losses)
        return batch

    def _cut(self, program: Program, inputs: Value, targets: Value, *, needs_targets: bool) -> Batch:
        """The batch of this copy, weighed among those of all; where one copy refuses its own, all raise."""
        batch = Batch()
        refusal: Exception | None = None
        try:
            batch = Batch.cut(
                program.num_microbatches,
                self.sharing.inputs(inputs),
                targets,
                needs_inputs=self.needs_inputs,
                needs_targets=needs_targets,
            )
            if self._sliced:
                cut_sequences(batch, self.schedule.num_slices, self._slice_lengths)
        except Exception as error:
            refusal = error
        # Of several copies the last ranks tell each other. Other ranks are at work when one hears of it, or when one
        # before the last refuses: closing tells them. Of one copy, a rank that refused may be called again.
        axis = self.sharing.axis
        apart = self.num_ranks > len(self.local_ranks) and axis is not None and axis.degree > 1
        with self.driver.ended_by_errors() if apart else nullcontext():
            if needs_targets:
                batch.weigh(self.sharing.sum_samples(batch.num_samples, refusal))
            elif refusal is not None:
                raise refusal
        return batch
