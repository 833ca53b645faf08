"""How a `Pipeline` is made of its parts.

every process:   check arguments -> split -> programs -> connect -> own stages -> executor
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

from pipeloom.common.quantities import counted
from pipeloom.devices import device_of as runtime_device
from pipeloom.engine.calls.reader import Batching, Programs
from pipeloom.engine.elsewhere import parameters_elsewhere
from pipeloom.engine.executor import Executor
from pipeloom.engine.model_state import ModelState
from pipeloom.engine.rank_state import LossFn
from pipeloom.engine.stores.sharing import Sharing
from pipeloom.errors import InputError
from pipeloom.ir import DataAxis, Granularity, Program, Schedule, Skip, check, routes
from pipeloom.parallel import Mesh, OffloadActivations
from pipeloom.parallel.context.attention_modules import check_heads_of_model
from pipeloom.parallel.data.sharing import share
from pipeloom.parallel.offload.activations import open_activation_offload
from pipeloom.parallel.options import check_synchronous
from pipeloom.parallel.tensor.batch_rule import BatchRule
from pipeloom.passes import evaluation_schedule, lower, merge_backwards, separate_units
from pipeloom.pretrained.stages import device_of, forbid_saving, load_stages
from pipeloom.processes.agreement import RunFingerprint, gather_json
from pipeloom.processes.host_memory import give_back_freed_memory, keep_freed_memory
from pipeloom.processes.members import current_members
from pipeloom.slicing import make_sliceable
from pipeloom.split import Stages, split
from pipeloom.split.compiling import compile_stages
from pipeloom.split.huggingface import DecoderStage
from pipeloom.split.layouts.layout import find_layout
from pipeloom.split.planned.stage import PlannedStage
from pipeloom.split.traced.stage import TracedStage
from pipeloom.training.argument_checks import (
    check_arguments,
    check_graphs,
    check_placed,
    check_recompute,
    context_of,
)
from pipeloom.training.losses.own_loss import OwnLoss
from pipeloom.training.losses.traced_loss import TracedLoss
from pipeloom.training.losses.watched_loss import WatchedLoss
from pipeloom.training.plan_options import Model, PipelineOptions
from pipeloom.training.stage_buffers import StageBuffers
from pipeloom.transport.connect import Connection, connect
from pipeloom.transport.interface import Transport


def construct(
    model: Model,
    schedule: Schedule,
    options: PipelineOptions,
    *,
    loss_fn: LossFn | None,
    layers: Sequence[str] | None,
    example: Any,
    transport: str | Transport,
    compiles: bool,
    graphs: bool,
    blackbox: Any,
    timeout_seconds: float,
) -> tuple[ModelState, Executor, StageBuffers]:
    """The stages and parameters of this process, and what runs them. For arguments and errors see `Pipeline`.

    The third is checked after the first training step.
    """
    cut, slices, recompute, offload, mesh, data, precision, context = options
    cut, recompute = "layers" if cut is None else cut, "none" if recompute is None else recompute
    check_arguments(schedule, loss_fn, slices, offload, mesh, timeout_seconds)
    if graphs:
        check_graphs(schedule, options, transport)
    schedule = merge_backwards(schedule)
    sliced = schedule.num_slices > 1 or slices is not None
    parts = context_of(mesh, context, schedule, sliced=sliced)

    in_parts = sliced or parts is not None
    stages = _stages(model, schedule.num_stages, layers, cut, example, in_parts=in_parts)
    if loss_fn is None and not in_parts and stages.modules:
        loss_fn = _own_loss(model, stages.modules)
        if isinstance(loss_fn, OwnLoss) and mesh is None and not (compiles or graphs):
            loss_fn.compare_with_halves()
    skips = routes(stages.skips, schedule.placement)
    if graphs and skips:
        raise InputError("graphs=True: values that skip stages are not recorded. Use graphs=False.")
    is_cut = not isinstance(model, nn.Module | Stages)  # a list may hold placeholders for stages of other ranks
    kinds = check_recompute(recompute, schedule, transport, () if is_cut else stages.modules, sliced=sliced)
    for module in stages.modules if in_parts else ():
        make_sliceable(module, context=parts is not None)

    check_placed(mesh, stages.modules, is_whole=not is_cut)
    if parts is not None:
        check_heads_of_model(stages.modules, parts.kind, parts.axis.degree)
    sharing = share(mesh, data, precision, timeout_seconds)
    tied = [parameter.stages for parameter in stages.tied]
    device = device_of(stages)
    sharing.check_device(device)
    one_order = bool(graphs or skips or offload is not None or tied)  # for memory that actions of a rank share
    schedule = _with_pairs(schedule, device, sharing.axis, one_order=one_order)
    programs = _programs(schedule, tied, sharing.axis, offload, tuple(skips))
    if schedule.overlapped and mesh is not None:
        mesh.overlap_pairs(runtime_device(device))

    open_mover = open_activation_offload(offload, device) if offload is not None else lambda: None
    fingerprint = RunFingerprint.of(
        programs.train, () if is_cut else stages.layers, slices, sharing.terms, parts.terms if parts else ()
    )
    connection = _connect(programs.train, fingerprint, mesh, sharing, transport, timeout_seconds, device)
    ranks, own = _load(stages, programs.train, connection, sharing, compiles=compiles)
    state = ModelState(stages, programs.train, ranks, sharing)
    elsewhere = None if connection.rank is None else parameters_elsewhere(stages.modules, own)
    batching = Batching(
        check=BatchRule(stages.modules, 1 if parts is None else parts.axis.degree),
        loss_fn=WatchedLoss.of(loss_fn, is_asynchronous=device.type == "cuda", in_parts=in_parts, elsewhere=elsewhere),
        sliced=sliced,
        slice_lengths=slices,
        parts=parts,
    )
    executor = Executor(
        state,
        programs,
        connection,
        batching,
        recompute=kinds,
        open_mover=open_mover,
        blackbox=blackbox,
        skips=skips,
        graphs=graphs,
        elsewhere=elsewhere or {},
    )
    return state, executor, StageBuffers(stages, state.stages, programs.train.placement)


def _with_pairs(schedule: Schedule, device: torch.device, axis: DataAxis | None, *, one_order: bool) -> Schedule:
    """The schedule with its overlapped pairs, or with the two of each pair in turn where they cannot overlap.

    They cannot with `one_order`, with gradients that are reduced within the step, nor on a CPU.
    """
    in_step = axis is not None and axis.granularity is not Granularity.STEP
    if one_order or in_step or not runtime_device(device).is_asynchronous:
        return separate_units(schedule)
    return schedule


def _own_loss(model: Any, stages: Sequence[nn.Module]) -> OwnLoss | None:
    """The loss that the model computes; None: stages do not run its forward."""
    if any(isinstance(module, TracedStage) for module in stages):
        return TracedLoss.of(model, stages[-1])
    if not isinstance(model, nn.Module) or any(isinstance(module, DecoderStage) for module in stages):
        return None
    if find_layout(model) is not None:
        return OwnLoss(model)
    own = OwnLoss(model, shows_labels=True)  # of forward(tokens, targets=None)
    return own if own.takes_labels and isinstance(stages[-1], PlannedStage) else None


def _stages(
    model: Model,
    num_stages: int,
    layers: Sequence[str] | None,
    cut: str | Sequence[int] | Sequence[str],
    example: Any,
    *,
    in_parts: bool,
) -> Stages:
    """The model as `num_stages` stages, which run slices or parts of sequences if `in_parts`.

    Raises:
        InputError: it has another number of stages, or values that skip stages and sequences in parts.
    """
    stages = model
    if not isinstance(stages, Stages):
        agree = _times_of_the_first_process
        stages = split(
            stages, num_stages, layers=layers, cut=cut, parts_of_sequences=in_parts, example=example, agree=agree
        )
    if len(stages.modules) != num_stages:
        raise InputError(
            f"the model has {len(stages.modules)} stages and the schedule {num_stages}: the numbers must be equal. Cut "
            f"the model into {num_stages} stages."
        )
    if stages.skips and in_parts:
        raise InputError(
            f"the model has {counted(len(stages.skips), 'value')} that skip stages, which slices and context "
            "parallelism do not support. Remove slices, or use a mesh without axis cp."
        )
    return stages


def _times_of_the_first_process(times: list[float]) -> list[float]:
    """Measured times, the same on all processes."""
    found = gather_json(times, current_members(), lost="another rank ended or timed out while it traced its model")
    return [float(seconds) for seconds in found[0]]


def _connect(
    program: Program,
    fingerprint: RunFingerprint,
    mesh: Mesh | None,
    sharing: Sharing,
    transport: str | Transport,
    timeout_seconds: float,
    device: torch.device,
) -> Connection:
    """Connect the ranks of `program` and of all replicas; sets how this process keeps freed memory."""
    between: dict[str, Any] = {}
    if mesh is not None:
        between = {"replicas": mesh.lines("pp"), "batches": mesh.batches(), "members": mesh.members}
    connection = connect(program.num_ranks, transport, timeout_seconds, fingerprint, device=device, **between)
    if connection.rank is not None:
        frees = sharing.axis is not None and sharing.axis.strategy.shards_parameters
        give_back_freed_memory() if frees else keep_freed_memory()
    return connection


def _load(
    stages: Stages, program: Program, connection: Connection, sharing: Sharing, *, compiles: bool
) -> tuple[Sequence[int], list[int]]:
    """Load and compile the stages of this process; returns its ranks and these stages.

    Where other processes train a part of the model, its own ``save_pretrained`` is forbidden.
    """
    ranks = range(program.num_ranks) if connection.rank is None else [connection.rank]
    own = sorted({stage for rank in ranks for stage in program.placement.stages_of[rank]})
    load_stages(stages, own)
    if compiles:
        compile_stages([stages.modules[stage] for stage in own])
    own_values = sharing.axis is None or not sharing.axis.unshards
    has_all = own_values and program.num_ranks == 1 and not sharing.blocks.divides
    if connection.rank is not None and not has_all:
        forbid_saving(stages)
    return ranks, own


def _programs(
    schedule: Schedule,
    tied: list[tuple[int, ...]],
    data: DataAxis | None,
    offload: OffloadActivations | None,
    skips: tuple[Skip, ...],
) -> Programs:
    """The checked programs of a training step and of evaluation; `tied` are the stages of each shared parameter."""
    if data is not None:
        check_synchronous(schedule, "data parallelism, ZeRO or a 16-bit format")
    train = lower(schedule, tied_stages=tuple(tied), data=data, skips=skips)
    if offload is not None and not schedule.forward_only:
        train = offload.insert(train)
    check(train)

    @cache
    def forward_of(num_microbatches: int | None) -> Program:
        program = lower(evaluation_schedule(schedule, num_microbatches), data=data, skips=skips)
        check(program)
        return program

    forward = forward_of(None)
    return Programs(train, forward, lambda count: forward if count == forward.num_microbatches else forward_of(count))
