"""`StepCosts`: what the search asks of a model's costs, and what does not depend on the model. No torch here."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence

from pipeloom import schedules
from pipeloom.ir import Op, Placement, Program, Schedule
from pipeloom.passes import insert_offload, lower, merge_backwards
from pipeloom.passes.offload import least_held
from pipeloom.plan.cluster import Cluster
from pipeloom.plan.costs.configuration import Configuration
from pipeloom.plan.costs.shared_sums import measured_sum_seconds, shared_sum_seconds
from pipeloom.plan.memory import OPTIMIZERS, MemoryModel
from pipeloom.plan.stage_times import Seconds
from pipeloom.schedules import Conditions
from pipeloom.sim import Costs, Network, Timeline, simulate
from pipeloom.sim.shared_cores import simulate_shared
from pipeloom.sim.simulator import StepSeconds, simulate_seconds


class StepCosts(ABC):
    """Seconds and bytes of configurations of one model on one cluster.

    Attributes:
        cluster: where the model is trained.
    """

    cluster: Cluster

    @property
    @abstractmethod
    def num_blocks(self) -> int:
        """Blocks, which stages consist of."""

    @property
    @abstractmethod
    def tokens(self) -> int:
        """Tokens per sample."""

    @property
    @abstractmethod
    def expert_degrees(self) -> list[int]:
        """Expert-parallel degrees that divide the experts."""

    @property
    def has_experts(self) -> bool:
        """Whether processes can share experts of the model."""
        return max(self.expert_degrees) > 1

    @property
    @abstractmethod
    def merges_backwards(self) -> bool:
        """Whether I and W that follow each other run as a whole backward, which is faster."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The model, for output."""

    def operations(self, of: Configuration) -> float | None:
        """Operations of the model per step, of all devices; nothing that is repeated counts. None: unknown."""
        return None

    def unknown(self, of: Configuration) -> str | None:
        """Why the costs of a degree inside a stage or of a micro-batch size are unknown; None: they are not."""
        return None

    @property
    def can_offload(self) -> bool:
        """Whether devices have a link of known bandwidth to a host with memory of its own."""
        return self.cluster.measured is None and self.cluster.device.host_bytes_per_second is not None

    @abstractmethod
    def check(self, of: Configuration) -> None:
        """Raises InputError for sizes that processes cannot share."""

    @abstractmethod
    def stage_seconds(self, of: Configuration) -> list[Seconds]:
        """Seconds of F, I and W of every stage on one micro-batch."""

    @property
    def uncorrected(self) -> tuple["StepCosts", float]:
        """The costs without corrections by measured steps, and the least of these factors: together lower bounds."""
        return self, 1.0

    def same_seconds(self, of: Configuration) -> Hashable:
        """What seconds of single blocks depend on, beside recomputation and blocks per stage."""
        return of

    def same_blocks(self, start: int, end: int) -> Hashable:
        """What the bytes of these blocks depend on, beside the configuration."""
        return start, end

    @abstractmethod
    def message_bytes(self, of: Configuration) -> float:
        """Bytes from one stage to the next, per process and micro-batch, at least."""

    @abstractmethod
    def memory_model(self, of: Configuration) -> MemoryModel:
        """What memory forecasts need."""

    @abstractmethod
    def costs(self, of: Configuration) -> Costs:
        """Seconds and bytes of every stage, for the simulator."""

    @abstractmethod
    def stage_units(self, of: Configuration) -> list[int]:
        """In how many units the parameters of every stage are gathered, and their gradients reduced."""

    @abstractmethod
    def network(self, of: Configuration) -> Network:
        """The links between stages, and between processes with the same parameters."""

    @abstractmethod
    def parameters(self, of: Configuration) -> list[float]:
        """Elements of the parameters of every stage on one process."""

    @abstractmethod
    def held_parameters(self, of: Configuration, stages: Sequence[int]) -> float:
        """Elements of the parameters of a process with these stages; a shared one counts once."""

    @abstractmethod
    def kept_bytes(self, of: Configuration) -> list[float]:
        """Bytes that F of one micro-batch keeps on every stage."""

    @abstractmethod
    def update_seconds(self, of: Configuration, stages_of: Sequence[Sequence[int]]) -> float:
        """Seconds of the optimizer's update on the rank with most parameters."""

    def schedule(self, of: Configuration, memory_limit: float | None = None) -> Schedule:
        """The named schedule, built for the costs where its family does so.

        Args:
            of: the configuration.
            memory_limit: activations of a rank, in shares of one rank on one micro-batch, for schedules built for it.

        Raises:
            ScheduleError: the schedule does not support the sizes.
        """
        family = schedules.find(of.schedule)
        conditions = None
        if family.to_measure:
            conditions = self._conditions(of, memory_limit)
        return family(
            num_ranks=of.pipeline,
            num_microbatches=of.microbatches,
            num_chunks=None if family.chunks else of.chunks,
            num_slices=of.slices,
            conditions=conditions,
        )

    def _conditions(self, of: Configuration, memory_limit: float | None) -> Conditions:
        plan = Schedule(
            name=of.schedule, num_microbatches=1, placement=Placement.loop(of.pipeline, of.chunks), orders=()
        )
        costs, network = self.costs(of), self.network(of)
        seconds = costs.seconds(plan)
        kept = costs.bytes_kept(plan)
        assert kept is not None
        share = sum(kept[0]) / of.pipeline
        return Conditions(
            forward=seconds[Op.F],
            backward_input=seconds[Op.I],
            backward_weight=seconds[Op.W],
            latency=network.message_seconds(plan, costs),
            activation=kept[0],
            weight_gradient=kept[1],
            caps=(float("inf") if memory_limit is None else memory_limit * share,) * of.pipeline,
        )

    def program(self, of: Configuration, schedule: Schedule | None = None) -> Program:
        """What every replica runs."""
        return self.offloading(of, self.lowered(of, schedule))

    def lowered(self, of: Configuration, schedule: Schedule | None = None) -> Program:
        """`program` before activations are offloaded."""
        schedule = schedule or self.schedule(of)
        return lower(merge_backwards(schedule) if self.merges_backwards else schedule, data=of.data_axis())

    def offloading(self, of: Configuration, program: Program) -> Program:
        """A lowered program, in which activations are offloaded."""
        return program if of.offload is None else insert_offload(program, of.offload or least_held(program))

    def state_bytes(self, of: Configuration, elements: float) -> float:
        """Bytes of the optimizer's states of so many parameters that are offloaded."""
        return 4 * OPTIMIZERS[of.optimizer] * elements if of.offload_states else 0.0

    def with_states(self, of: Configuration, seconds: float, elements: float) -> float:
        """Seconds of an update of `elements` that takes `seconds`, while offloaded states come and go."""
        rate = self.cluster.host_rate
        return seconds if rate is None else max(seconds, 2 * self.state_bytes(of, elements) / rate)

    def shared_sum_seconds(self, of: Configuration, placement: Placement) -> float:
        """Seconds of the sums of gradients between ranks of a pipeline that hold the same stage."""
        if not placement.is_replicated:
            return 0.0
        cluster = self.cluster.beside(of.devices)
        if cluster.measured is not None:
            return measured_sum_seconds(of, placement, self.parameters(of), cluster)
        return shared_sum_seconds(of, placement, self.parameters(of), self.network(of))

    def timeline(
        self,
        of: Configuration,
        program: Program | Schedule,
        costs: Costs | None = None,
        network: Network | None = None,
    ) -> Timeline:
        """A simulated step, without the update. Processes beyond the cores of a measured machine take turns.

        Args:
            of: the configuration.
            program: what every replica runs.
            costs, network: in place of those of the configuration.
        """
        costs, network, measured = costs or self.costs(of), network or self.network(of), self.cluster.measured
        if measured is None or of.devices <= measured.cores:
            return simulate(program, costs, network)
        program = program if isinstance(program, Program) else lower(program)
        copies, crowding = of.devices // of.pipeline, self.crowding(of)
        return simulate_shared(program, costs, network, cores=measured.cores, copies=copies, crowding=crowding)

    def seconds(self, of: Configuration, program: Program, network: Network | None = None) -> StepSeconds:
        """The seconds of `timeline`, in less time."""
        network, measured = network or self.network(of), self.cluster.measured
        if measured is None or of.devices <= measured.cores:
            return simulate_seconds(program, self.costs(of), network)
        return StepSeconds.of(self.timeline(of, program, None, network))

    def crowding(self, of: Configuration) -> float:
        """Slowdown of processes that take turns on the cores of a measured machine, beside their shares of a core."""
        measured = self.cluster.measured
        return 1.0 if measured is None else measured.crowding(of.devices)
