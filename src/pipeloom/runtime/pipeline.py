"""`Pipeline`: a model, a schedule and a transport, ready to step.

every rank:   split -> own stages -> bind programs (step, evaluate, forward) -> run -> loss on every rank
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.errors import InputError, RunError
from pipeloom.ir import Action, Op, Placement, Program, Schedule, WeightPolicy, check, peer_of
from pipeloom.passes import forward_only, lower, merge_backwards
from pipeloom.runtime.connect import connect
from pipeloom.runtime.gradient_sum import GradientSum, Shared
from pipeloom.runtime.loopback import LoopbackTransport
from pipeloom.runtime.transport import Channel, Lane, Transport
from pipeloom.runtime.values import Value, flatten, join_batch, split_batch
from pipeloom.runtime.worker import Batch, Bound, LossFn, Worker
from pipeloom.split import Stages, split


class Pipeline:
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
        blackbox: a writable buffer of 64 bytes into which the label of the running action is written.
        timeout_seconds: how long a rank may wait for a message.

    Where all ranks share this process, parameters that several ranks hold exist once for each of them, as they would
    in processes of their own: make the optimizer from `parameters`.

    Raises:
        InputError: illegal schedule, a model that cannot be cut so, a process group of another size; before any
            communication.
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
        blackbox: Any = None,
        timeout_seconds: float = 1800.0,
    ) -> None:
        check(schedule)
        _check_runnable(schedule)
        schedule = merge_backwards(schedule)
        cut_model = model if isinstance(model, Stages) else split(model, schedule.num_stages, layers=layers, cut=cut)
        if len(cut_model.modules) != schedule.num_stages:
            raise InputError(
                f"a model of {len(cut_model.modules)} stages for a schedule of {schedule.num_stages}: the numbers "
                f"must be equal; cut the model into {schedule.num_stages}"
            )
        self.schedule = schedule
        self.parameter_names = cut_model.parameter_names
        tied = tuple(parameter.stages for parameter in cut_model.tied)
        self._train_program = lower(schedule, tied_stages=tied)
        self._forward_program = lower(forward_only(schedule))
        check(self._train_program)
        check(self._forward_program)

        connection = connect(schedule.num_ranks, transport, timeout_seconds)
        self.rank = connection.rank
        self.process_group = connection.process_group
        self._transport = connection.transport
        self.local_ranks: tuple[int, ...] = tuple(range(self.num_ranks)) if self.rank is None else (self.rank,)
        self._transport.open(self._channels())

        by_rank = {
            rank: _own_stages(cut_model, schedule.placement, rank, first=rank == self.local_ranks[0])
            for rank in self.local_ranks
        }
        self.stages: dict[int, nn.Module] = {
            stage: module for stages in reversed(by_rank.values()) for stage, module in stages.items()
        }
        self._held, self._stages_of = self._find_parameters(by_rank, cut_model)
        self._workers = {
            rank: Worker(
                rank,
                stages,
                loss_fn=loss_fn,
                transport=self._transport,
                gradient_sum=GradientSum(rank, self._shared_parameters(rank, stages), self._transport),
                blackbox=blackbox,
            )
            for rank, stages in by_rank.items()
        }
        self._loss_fn = loss_fn
        self._bound: dict[tuple[int, bool], Bound] = {}
        self._last_run: dict[int, Bound] = {}
        self._failed: BaseException | None = None
        self._threads = (
            ThreadPoolExecutor(
                self.num_ranks, "rank", initializer=_share_cores, initargs=(self.num_ranks, torch.get_num_threads())
            )
            if self.rank is None and self._transport.blocking and self.num_ranks > 1
            else None
        )

    # What this process holds

    @property
    def num_ranks(self) -> int:
        return self.schedule.num_ranks

    @property
    def needs_inputs(self) -> bool:
        """Whether this process holds the first stage."""
        return 0 in self.stages

    @property
    def needs_targets(self) -> bool:
        """Whether this process holds the last stage."""
        return self.schedule.num_stages - 1 in self.stages

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Canonical name and parameter of everything that the ranks of this process hold, in the model's order.

        A parameter that several ranks of this process hold comes once for each of them.
        """
        for name in self.parameter_names:
            for held in self._held.values():
                if name in held:
                    yield name, held[name]

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters that this process's optimizer has to update."""
        for _, parameter in self.named_parameters():
            yield parameter

    def owned_parameters(self) -> Iterator[tuple[int, nn.Parameter]]:
        """Position in `parameter_names` and parameter, of those that no lower rank holds too.

        Over all processes these are the model's parameters, each once: for norms and checkpoints.
        """
        for position, name in enumerate(self.parameter_names):
            for rank, held in self._held.items():
                if name in held and rank == self._ranks_with(name)[0]:
                    yield position, held[name]

    def modules(self) -> Iterator[nn.Module]:
        """The stage modules of all ranks of this process."""
        for worker in self._workers.values():
            yield from worker.stages.values()

    def train(self, mode: bool = True) -> Pipeline:
        """Set the training mode of all stages held here."""
        for module in self.modules():
            module.train(mode)
        return self

    def eval(self) -> Pipeline:
        """Set the evaluation mode of all stages held here."""
        return self.train(False)

    # What it does

    def step(self, inputs: Value = None, targets: Value = None) -> Tensor:
        """Forward and backward of one batch; gradients add to ``.grad`` as in plain accumulation.

        Args:
            inputs: the whole batch, samples along dimension 0; read on the rank with the first stage.
            targets: likewise, read on the rank with the last stage.

        Returns:
            The loss, the mean over all samples of the batch, on every rank; without a graph.

        Raises:
            InputError: no loss function, a batch smaller than the number of micro-batches, inputs missing.
            StageError: the model or the loss raised. PeerLost: another rank ended.
        """
        if self._loss_fn is None:
            raise InputError("step() on a Pipeline without loss_fn: a step needs a loss; pass loss_fn to Pipeline")
        return self._loss(self._run(self._train_program, inputs, targets, with_loss=True))

    def evaluate(self, inputs: Value = None, targets: Value = None) -> Tensor:
        """The loss of one batch in evaluation mode, on every rank; gradients and modes stay as they are."""
        if self._loss_fn is None:
            raise InputError("evaluate() on a Pipeline without loss_fn: it returns a loss; pass loss_fn to Pipeline")
        modes = [(module, module.training) for stage in self.modules() for module in stage.modules()]
        self.eval()
        try:
            with torch.no_grad():
                return self._loss(self._run(self._forward_program, inputs, targets, with_loss=True))
        finally:
            for module, training in modes:
                module.training = training

    def forward(self, inputs: Value = None) -> Value:
        """The model's output for a batch, on the ranks with the last stage; None elsewhere. Modes stay as set."""
        with torch.no_grad():
            batch = self._run(self._forward_program, inputs, None, with_loss=False)
        return join_batch([batch.outputs[b] for b in sorted(batch.outputs)]) if batch.outputs else None

    @property
    def records(self) -> list[tuple[int, list[tuple[Action, float, float]]]]:
        """For each rank of this process, the actions of the last run with start and end (perf_counter seconds)."""
        return [(rank, bound.records()) for rank, bound in self._last_run.items()]

    @property
    def peak_live_activations(self) -> dict[int, int]:
        """For each rank of this process, the most activations held at once in the last run."""
        return {rank: worker.peak_live_activations for rank, worker in self._workers.items()}

    @property
    def live_activations(self) -> dict[int, int]:
        """For each rank of this process, the activations held now; zero between steps."""
        return {rank: worker.live_activations for rank, worker in self._workers.items()}

    def close(self) -> None:
        """Close the channels. The parameters stay usable."""
        if self._threads is not None:
            self._threads.shutdown()
        self._transport.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # How

    def _run(self, program: Program, inputs: Value, targets: Value, *, with_loss: bool) -> Batch:
        """Run `program` on all ranks of this process."""
        if self._failed is not None:
            raise RunError(f"this Pipeline failed before ({self._failed}): its ranks are out of step; make a new one")
        batch = self._cut_batch(inputs, targets, with_loss)
        bound = {rank: self._bind(rank, program) for rank in self.local_ranks}
        runs = {rank: self._workers[rank].run(bound[rank], batch) for rank in self.local_ranks}
        self._last_run = bound
        try:
            if self._threads is not None:
                self._run_threads(runs)
            else:
                _take_turns(list(runs.values()))
            self._transport.end_step()
            self._share_losses(batch, with_loss)
        except BaseException as error:
            self._failed = error
            self.close()
            raise
        return batch

    def _run_threads(self, runs: dict[int, Iterator[None]]) -> None:
        assert self._threads is not None
        assert isinstance(self._transport, LoopbackTransport)
        transport, grad = self._transport, torch.is_grad_enabled()

        def drive(rank: int) -> None:
            try:
                with torch.set_grad_enabled(grad):
                    for _ in runs[rank]:
                        pass
            except BaseException:
                transport.interrupt(rank)
                raise

        futures = [self._threads.submit(drive, rank) for rank in runs]
        errors = [error for error in (future.exception() for future in futures) if error is not None]
        if errors:  # the first cause, rather than those who lost their peer through it
            raise min(errors, key=lambda error: type(error).__name__ == "PeerLost")

    def _bind(self, rank: int, program: Program) -> Bound:
        key = (rank, program.schedule.forward_only)
        if key not in self._bound:
            self._bound[key] = self._workers[rank].bind(program)
        return self._bound[key]

    def _cut_batch(self, inputs: Value, targets: Value, with_loss: bool) -> Batch:
        count = self.schedule.num_microbatches
        batch = Batch()
        if self.needs_inputs:
            if inputs is None:
                raise InputError("inputs are None on the rank with the first stage: it reads them; pass the batch")
            batch.inputs, sizes = split_batch(inputs, count, "inputs")
        if self.needs_targets and with_loss:
            if targets is None:
                raise InputError("targets are None on the rank with the last stage: it reads them; pass the batch")
            batch.targets, sizes = split_batch(targets, count, "targets")
            batch.weights = [size / sum(sizes) for size in sizes]
        return batch

    def _share_losses(self, batch: Batch, with_loss: bool) -> None:
        """Every rank learns the losses of all micro-batches from the ranks with the last stage."""
        if not with_loss or self.rank is None:
            return
        holders = self.schedule.placement.replicas[-1]
        if self.rank in holders:
            own = flatten(tuple(batch.losses[b] for b in sorted(batch.losses)))
            for peer in range(self.num_ranks):
                if peer != self.rank:
                    self._transport.outgoing(Channel(self.rank, peer, Lane.LOSS)).send(*own)
        for holder in holders:
            if holder != self.rank:
                _, losses = self._transport.incoming(Channel(holder, self.rank, Lane.LOSS)).receive()
                batch.losses.update(zip(self._microbatches_of(holder), losses, strict=True))

    def _microbatches_of(self, holder: int) -> list[int]:
        """The micro-batches whose last stage runs on rank `holder`."""
        place, last = self.schedule.placement.rank_of, self.schedule.num_stages - 1
        return [b for b in range(self.schedule.num_microbatches) if place(last, b) == holder]

    def _loss(self, batch: Batch) -> Tensor:
        """The sum in order of micro-batches, the same on every rank to the last bit."""
        ordered = [batch.losses[b] for b in sorted(batch.losses)]
        total = ordered[0].clone()
        for loss in ordered[1:]:
            total += loss
        return total.reshape(())

    def _channels(self) -> list[Channel]:
        """All channels of all programs, in an order that every rank agrees on."""
        channels: set[Channel] = set()
        place = self.schedule.placement
        for rank, action in self._train_program.actions():
            if action.op in (Op.SEND_F, Op.SEND_B):
                channels.add(Channel(rank, peer_of(action, place), Lane.PIPELINE))
        for group in self._train_program.gradient_groups:
            ranks = self._train_program.ranks_of_group(group)
            channels.update(Channel(a, b, Lane.GRADIENT) for a in ranks for b in ranks if a != b)
        if self.rank is not None:
            for holder in place.replicas[-1]:
                channels.update(Channel(holder, peer, Lane.LOSS) for peer in range(self.num_ranks) if peer != holder)
        return sorted(channels)

    def _find_parameters(
        self, by_rank: dict[int, dict[int, nn.Module]], cut_model: Stages
    ) -> tuple[dict[int, dict[str, nn.Parameter]], dict[str, tuple[int, ...]]]:
        """For each rank of this process its parameters by canonical name; for each of those all stages that hold it."""
        tied = {parameter.name: parameter.stages for parameter in cut_model.tied}
        held: dict[int, dict[str, nn.Parameter]] = {}
        stages_of: dict[str, tuple[int, ...]] = {}
        for rank, stages in by_rank.items():
            held[rank] = {}
            for stage, module in stages.items():
                for alias, parameter in module.named_parameters():
                    name = cut_model.canonical_names.get(alias, alias)
                    held[rank][name] = parameter
                    stages_of[name] = tied.get(name, (stage,))
        return held, stages_of

    def _ranks_with(self, name: str) -> tuple[int, ...]:
        """The ranks that hold a parameter, ascending."""
        return self._train_program.ranks_of_group(self._stages_of[name])

    def _shared_parameters(self, rank: int, stages: dict[int, nn.Module]) -> dict[int, Shared]:
        """What REDUCE_GRAD sums on `rank`: by the stage it stands under, this rank's copies and all ranks with one."""
        result: dict[int, Shared] = {}
        for group in self._train_program.gradient_groups:
            lowest = min((stage for stage in group if stage in stages), default=None)
            if lowest is not None:
                result[lowest] = {
                    name: (parameter, self._ranks_with(name))
                    for name, parameter in self._held[rank].items()
                    if set(group).issuperset(self._stages_of[name]) and len(self._ranks_with(name)) > 1
                }
        return result


def _check_runnable(schedule: Schedule) -> None:
    """Refuse what the checker and the simulator know but the executor would run as something else."""
    if schedule.num_slices != 1:
        raise InputError(
            f"schedule {schedule.name!r} has {schedule.num_slices} slices a micro-batch: the executor runs whole "
            "micro-batches; take a schedule without slices"
        )
    if schedule.weights is not WeightPolicy.FLUSH:
        raise InputError(
            f"schedule {schedule.name!r} has weight policy {schedule.weights.value!r}: the executor runs 'flush', one "
            "version of the weights; take a synchronous schedule"
        )


def _own_stages(cut_model: Stages, placement: Placement, rank: int, *, first: bool) -> dict[int, nn.Module]:
    """The modules of one rank's stages.

    The first rank of a process takes the model's own modules. Another rank in the same process may share parameters
    with it (tied, or replicas); it gets copies of those, as it would have in a process of its own.
    """
    modules = {stage: cut_model.modules[stage] for stage in placement.stages_of[rank]}
    if first:
        return modules
    tied = {name for parameter in cut_model.tied for name in parameter.names}
    kept: dict[int, Any] = {}  # what deepcopy leaves as it is, by identity
    shares = False
    for stage, module in modules.items():
        replica = len(placement.replicas[stage]) > 1
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if replica or name in tied:
                shares = True
            else:
                kept[id(parameter)] = parameter
        if not replica:
            kept.update((id(buffer), buffer) for buffer in module.buffers())
    return {stage: copy.deepcopy(module, kept) for stage, module in modules.items()} if shares else modules


def _take_turns(runs: list[Iterator[None]]) -> None:
    """One thread drives all runs: each goes on until it has to wait for another."""
    while runs:
        runs = [run for run in runs if next(run, runs) is not runs]


def _share_cores(num_ranks: int, num_threads: int) -> None:
    torch.set_num_threads(max(1, num_threads // num_ranks))
