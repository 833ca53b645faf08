"""Peak memory of every rank of a program, by kind, in closed form: nothing is allocated and nothing measured.

A rank's program is walked once. Parameters, masters, optimizer states, buffers and the weight versions of a stream are
there all the time. Activations come with F and go with B or W, or are offloaded. Full gradients of a stage are there
from its first backward to the reduction that covers it, and gathered parameters from UNSHARD to RESHARD. At granularity
microbatch, units are gathered one ahead and reduced one by one (`pipeloom.ir.unit_actions`).

At the end of a step, ranks that hold the same parameters exchange gradients, part by part.

Not counted: messages between stages, the workspace of single operations, and torch's own memory.
"""

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter

from pipeloom.errors import InputError
from pipeloom.ir import Op, Program
from pipeloom.ir.versions import weight_version_bytes
from pipeloom.plan.memory.memory_model import MemoryModel, num_parameters
from pipeloom.plan.memory.rank_units import RankUnits
from pipeloom.plan.memory.stage_units import ModelUnits, StageUnits
from pipeloom.plan.memory.state_bytes import NumberBytes

F, B, I, W = Op.F, Op.B, Op.I, Op.W  # noqa: E741  # looking up a member of an enumeration takes as long as two tuples
UNSHARD, RESHARD, OFFLOAD, RELOAD, REDUCE_GRAD = Op.UNSHARD, Op.RESHARD, Op.OFFLOAD, Op.RELOAD, Op.REDUCE_GRAD
_COUNTED = frozenset({F, B, I, W, OFFLOAD, RELOAD, UNSHARD, RESHARD, REDUCE_GRAD})
KINDS = {
    "parameters": "as forwards read them, all the time",
    "masters": "what the optimizer updates, where forwards read something else: masters, shards",
    "gradients": "full gradients, and sums over replicas",
    "optimizer": "optimizer states",
    "activations": "what forwards keep for backwards",
    "slices": "keys and values that slices of a sequence share, and their gradients",
    "skips": "values that skip stages, in flight to the ranks that use them",
    "gathered": "full parameters of zero3 while they are used",
    "recomputed": "activations of one block while its backward recomputes them",
    "temporary": "gradients of activations, and tensors that a layer makes and frees",
    "versions": "older weight versions of a stream",
    "buffers": "buffers of the model",
    "messages": "shared memory for gradients between replicas of a host",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """The memory of one rank of one replica, in bytes.

    Attributes:
        rank: of the pipeline.
        replica: number of the replica.
        kinds: peak memory of each of `KINDS`.
        peak: peak memory of all kinds together; at most the sum of `kinds`, whose peaks may be at different moments.
    """

    rank: int
    replica: int
    kinds: Mapping[str, float]
    peak: float


def memory_of_ranks(program: Program, model: MemoryModel, *, replica: int = 0) -> list[RankMemory]:
    """The memory of every rank of one replica while it runs `program` and updates its parameters.

    Args:
        program: what every replica runs.
        model: the layers, and how they are trained.
        replica: number of the replica. Under `parameter-server`, replica 0 holds more than the others. With uncut
            parameters, replicas differ a little.

    Raises:
        InputError: the model has another number of stages, or an unknown optimizer.
    """
    _check_stages(program, model)
    units = ModelUnits(program.placement, program.data, model, replica)
    return [_memory_of_rank(program, model, rank, units, replica) for rank in range(program.num_ranks)]


def memory_of_rank(program: Program, model: MemoryModel, rank: int, *, replica: int = 0) -> RankMemory:
    """One rank of `memory_of_ranks`."""
    _check_stages(program, model)
    return _memory_of_rank(program, model, rank, ModelUnits(program.placement, program.data, model, replica), replica)


def _memory_of_rank(program: Program, model: MemoryModel, rank: int, of_model: ModelUnits, replica: int) -> RankMemory:
    units = RankUnits(program, model, rank, of_model)
    most = _always(program, model, rank, units)
    peak = total = sum(most.values())
    changes = [0.0] * len(_CHANGING)
    for moment in _moments(program, units, rank):
        changes = list(map(max, changes, moment))
        peak = max(peak, total + moment[-1])
    for kind, size in zip(_CHANGING, changes, strict=True):
        most[kind] = max(most[kind], size)
    return RankMemory(rank=rank, replica=replica, kinds=most, peak=peak)


class RankPeaks:
    """The peak memory of every rank for several programs with the same sizes, and other micro-batches or offload.

    Args:
        program: one of them.
        model: the layers, and how they are trained.
        known: units of stages of earlier models, which are used again.
    """

    def __init__(self, program: Program, model: MemoryModel, known: dict[Hashable, StageUnits] | None = None) -> None:
        _check_stages(program, model)
        units = ModelUnits(program.placement, program.data, model, known=known)
        self._units = [RankUnits(program, model, rank, units) for rank in range(program.num_ranks)]
        self._always = [sum(_always(program, model, rank, units).values()) for rank, units in enumerate(self._units)]

    def of(self, program: Program) -> list[float]:
        """Bytes of each rank, as `memory_of_ranks` has them."""
        both = enumerate(zip(self._units, self._always, strict=True))
        return [
            total + max(map(itemgetter(-1), _moments(program, units, rank)), default=0.0)
            for rank, (units, total) in both
        ]


def _check_stages(program: Program, model: MemoryModel) -> None:
    stages = program.schedule.num_stages
    if len(model.stages) != stages:
        raise InputError(
            f"model.stages has {len(model.stages)} entries: the schedule has {stages} stages. Give the layers of each."
        )


def update_memory(program: Program, model: MemoryModel, rank: int, *, replica: int = 0) -> tuple[dict[str, float], int]:
    """The bytes of model state on a rank when it updates, by kind: all that is there between steps, and gradients.

    Returns:
        The bytes by kind of `KINDS`, and the number of parameters of the rank.
    """
    units = RankUnits(program, model, rank, ModelUnits(program.placement, program.data, model, replica))
    always = _always(program, model, rank, units)
    return always | {"gradients": units.gradient_sums()}, units.num_parameters


def _always(program: Program, model: MemoryModel, rank: int, units: RankUnits) -> dict[str, float]:
    """Bytes by kind of `KINDS` that are there all the time."""
    held = dict.fromkeys(KINDS, 0.0) | units.always()
    if program.schedule.microbatches_per_update is not None:
        of_stages = [NumberBytes.of(model.precision).compute * num_parameters(stage) for stage in model.stages]
        held["versions"] = weight_version_bytes(program.schedule, of_stages)[rank] - held["parameters"]
    return held | dict.fromkeys(model.elsewhere, 0.0)


_CHANGING = ("activations", "gradients", "slices", "skips", "gathered", "recomputed", "temporary")
# Bytes that come and go during an action: of `_CHANGING`, and all together with what is inside of it.
_Moment = tuple[float, float, float, float, float, float, float, float]


class _Gradients:
    """Gradients of a rank: full ones, and those behind their reductions.

    Attributes:
        now: bytes of all of them.
        backwards: of each stage since its last reduction.
    """

    def __init__(self, units: RankUnits) -> None:
        self._units, self._tied = units, units.tied_gradients
        self._of_stage = {stage: units.full_gradients(stage) for stage in units.stages}
        for first, (size, _) in self._tied.items():
            self._of_stage[first] -= size
        self._full: dict[int, float] = {}
        self._of_tied: dict[int, float] = {}
        self._reduced: dict[int, float] = {}
        self.backwards = dict.fromkeys(units.stages, 0)
        self._received = self.now = 0.0

    def add(self, stage: int) -> tuple[bool, float]:
        """A backward adds to those of a stage; whether there were none, and bytes of the others.

        Moments of a stage have the gradients of parameters that later stages of the rank share. Where a later stage
        has made them, the first backward of the stage makes them beside.
        """
        self.backwards[stage] += 1
        first = stage not in self._full
        before = self.now - (0.0 if first else self._full[stage] + self._of_tied.get(stage, 0.0))
        if first:
            self._full[stage] = self._of_stage[stage]
            self._of_tied |= {owner: size for owner, (size, users) in self._tied.items() if stage in users}
            self._sum()
        return first, before

    def reduce(self, stage: int) -> None:
        """They have been summed over replicas."""
        self.backwards[stage] = 0
        self._full.pop(stage, None)
        self._of_tied.pop(stage, None)
        self._reduced[stage] = self._units.reduced(stage)
        self._sum()

    def receive(self, size: float) -> None:
        """Other ranks have sent gradients of stages that the rank has not run."""
        self._received += size
        self._sum()

    def _sum(self) -> None:
        parts = (self._full, self._of_tied, self._reduced)
        self.now = self._received + sum(sum(part.values()) for part in parts)


class _Gathers:
    """Gathered parameters of a rank, in bytes: `now` all of them."""

    def __init__(self, units: RankUnits) -> None:
        self._units, self._now, self.now = units, dict[int, float](), 0.0
        self._of_stages: dict[int, tuple[float, float, float]] = {}
        self._coming: dict[int, tuple[float, float]] = {}  # of stages whose first computation has not run

    def begin(self, stage: int) -> None:
        """A stage is gathered."""
        if stage not in self._of_stages:
            self._of_stages[stage] = self._units.gathered(stage)
        begun, most, then = self._of_stages[stage]
        self._coming[stage] = most, then
        self._set(stage, begun)

    def during(self, stage: int) -> None:
        """A stage computes."""
        if stage in self._coming:
            self._set(stage, self._coming[stage][0])

    def behind(self, stage: int) -> None:
        """A stage has computed."""
        if stage in self._coming:
            self._set(stage, self._coming.pop(stage)[1])

    def end(self, stage: int) -> None:
        """The gathered parameters of a stage are freed."""
        self._now.pop(stage, None)
        self.now = sum(self._now.values())

    def _set(self, stage: int, size: float) -> None:
        self._now[stage] = size
        self.now = sum(self._now.values())


def _reducing_backwards(program: Program, rank: int) -> set[int]:
    """The positions of the B in which units of its stage are reduced: the last before a REDUCE_GRAD."""
    due, found = set[int](), set[int]()
    for position, action in reversed(list(enumerate(program.orders[rank]))):
        if action.op is REDUCE_GRAD and action.microbatch is not None:
            due.add(action.stage)
        elif action.op in (B, W) and action.stage in due:
            due.discard(action.stage)
            if action.op is B:
                found.add(position)
    return found


def _moments(program: Program, units: RankUnits, rank: int) -> Iterator[_Moment]:
    """The bytes of every action of a rank."""
    schedule = program.schedule
    slices, split, of_stages = schedule.num_slices, schedule.split_backwards, units.moments
    shared, skip_bytes = units.slice_bytes, {stage: units.skip_bytes(stage) for stage in units.stages}
    exchanged = units.exchanged
    reduces = units.reduces and schedule.microbatches_per_update is None
    gradients, gathers = _Gradients(units), _Gathers(units)
    activations = skipping = of_slices = 0.0
    reducing = _reducing_backwards(program, rank) if reduces else set()
    for position, (stage, op, microbatch, piece) in enumerate(program.orders[rank]):
        if op not in _COUNTED:
            continue
        index = piece or 0
        moments = of_stages[stage, index]
        before, inside, sending, again, temporary = gradients.now, 0.0, 0.0, 0.0, 0.0
        of_data = op is REDUCE_GRAD and microbatch is not None and reduces
        if op is F:
            activations += moments.kept
            of_slices += shared[stage][0] if index == 0 else 0.0
            skipping += skip_bytes[stage]
            gathers.during(stage)
            inside, temporary = moments.forward, moments.temporary[0]
        elif op is B or op is I:
            gathers.during(stage)
            inside, again, temporary = moments.inputs, moments.recomputed, moments.temporary[1]
            if op is B:
                first, before = gradients.add(stage)
                inside = moments.first if first else moments.later
                if position in reducing:
                    inside = moments.first_reducing if first else moments.later_reducing
        elif op is W:
            first, before = gradients.add(stage)
            inside, temporary = moments.first_weights if first else moments.later_weights, moments.temporary[2]
        elif op is RELOAD:
            activations += moments.kept
        elif op is UNSHARD:
            gathers.begin(stage)
        elif of_data:
            inside = sending = units.sending(stage, gradients.backwards[stage])
        elif op is REDUCE_GRAD and microbatch is None:
            inside = sending = exchanged[stage][0]
        together = activations + of_slices + skipping + gathers.now + before + inside
        held = gradients.now + sending
        yield activations, held, of_slices, skipping, gathers.now, again, temporary, together
        if op is F:
            gathers.behind(stage)
        elif op is B or op is I:
            gathers.behind(stage)
            skipping -= skip_bytes[stage]
            # Block after block, gradients of keys and values come while the activations of the slice go.
            of_slices += shared[stage][1] if index == slices - 1 else 0.0
            of_slices -= sum(shared[stage]) if index == 0 else 0.0
            if op is I:
                activations += moments.waiting - moments.kept
            elif (stage, microbatch, piece) not in split:
                activations -= moments.kept
        elif op is W:
            activations -= moments.waiting
        elif op is OFFLOAD:
            activations -= moments.kept
        elif op is RESHARD:
            gathers.end(stage)
        elif of_data:
            gradients.reduce(stage)
        elif op is REDUCE_GRAD and microbatch is None:
            gradients.receive(exchanged[stage][1])
