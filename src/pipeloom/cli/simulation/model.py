"""`pipeloom simulate --model`: times and memory of a transformer on a named device, for a layout inside its stages."""

import re
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, get_args

from pipeloom.cli.common.expert_options import EXPERTS, add_expert_options, check_experts, with_experts
from pipeloom.cli.common.inside_options import LAYOUT, add_inside_options, inside_of, plan_fields
from pipeloom.cli.common.parser import Parser
from pipeloom.common.quantities import BytesPerSecond, bytes_text, number_text, seconds_text, table_lines
from pipeloom.errors import InputError
from pipeloom.ir import DataAxis, DataStrategy, Granularity, Program, Schedule
from pipeloom.ir.recompute import Recompute
from pipeloom.parallel.options import DType, GradientDType, Precision
from pipeloom.passes import lower
from pipeloom.plan.architecture import Architecture
from pipeloom.plan.cluster import Cluster
from pipeloom.plan.costs.configuration import Configuration, even_blocks
from pipeloom.plan.costs.cost_model import CostModel
from pipeloom.plan.costs.links import ORDER
from pipeloom.plan.costs.named_clusters import CLUSTERS, DEVICES, find_cluster
from pipeloom.plan.costs.software import PIPELOOM, SOFTWARE
from pipeloom.plan.costs.step_bound import step_bound
from pipeloom.plan.memory import KINDS, OPTIMIZERS, MemoryModel, memory_of_ranks, num_parameters, transformer_layers
from pipeloom.plan.named_architectures import NAMED, find_architecture
from pipeloom.sim import Costs, Network, Timeline

_RATES = ("peak", "efficiency", "node_bandwidth", "network_bandwidth", "node_latency", "network_latency")
MODEL_OPTIONS = (
    *LAYOUT,
    *EXPERTS,
    *_RATES,
    *("sequence_length", "vocabulary_size", "microbatch_size", "recompute", "precision", "optimizer", "device"),
    *("devices_per_node", "software", "order", "blocks", "gradients"),
)
_DEVICE = "h100"


def add_model_options(parser: Parser) -> None:
    """Add the options of ``--model`` to the parser of `pipeloom simulate`."""
    group = parser.add_argument_group("model")
    option = group.add_argument
    text, whole, number, rate = (partial(option, type=kind) for kind in (str, int, float, BytesPerSecond))
    text("--model", metavar="NAME|FILE", help=f"times and memory of {' or '.join(NAMED)}, or of a JSON file's model")
    whole("--sequence-length", help="tokens per sample (default: the model's)")
    whole("--vocabulary-size", help="vocabulary size (default: the model's)")
    whole("--microbatch-size", help="samples per micro-batch (default: 1)")
    add_inside_options(group)
    add_expert_options(group)
    option("--recompute", choices=[str(kind) for kind in Recompute], help="activation recomputation (default: none)")
    option("--precision", choices=get_args(DType), help="number format of parameters (default: bf16; V100: fp16)")
    option("--gradients", choices=get_args(GradientDType), help="number format of gradient sums (default: float32)")
    option("--optimizer", choices=list(OPTIMIZERS), help="optimizer, for memory (default: adamw)")
    text("--blocks", metavar="N,N,..", help="blocks per stage (default: even)")
    text("--order", metavar="AXES", help="mesh axes, outermost first (default: dp,pp,cp,tp)")
    option("--software", choices=list(SOFTWARE), help=f"kernels and overlap (default: {PIPELOOM.name})")
    option("--device", choices=list(DEVICES), help=f"device and links, without --cluster (default: {_DEVICE})")
    number("--peak", help="operations per second of a device, in the number format")
    number("--efficiency", help="fraction of the peak rates that programs reach")
    whole("--devices-per-node", help="devices per node")
    rate("--node-bandwidth", help="bandwidth per device inside a node")
    rate("--network-bandwidth", help="bandwidth per node to other nodes")
    number("--node-latency", help="latency of a message inside a node in seconds")
    number("--network-latency", help="latency of a message between nodes in seconds")


class SimulatedModel:
    """The transformer that ``--model`` names, on its devices.

    Raises:
        InputError: an option is out of range, or sizes that the layout does not divide.
    """

    def __init__(self, options: Any) -> None:
        self._options = options
        given = {name: value for name, value in vars(options).items() if value is not None and name in MODEL_OPTIONS}
        self._given = given
        for name in ("microbatch_size", "sequence_length", "vocabulary_size", "devices_per_node"):
            if given.get(name, 1) < 1:
                raise InputError(f"--{name.replace('_', '-')} {given[name]}: must be at least 1.")
        self.inside = with_experts(inside_of(given), given, options.data or 1)
        model = find_architecture(options.model, "--model")
        sizes = {name: given[name] for name in ("sequence_length", "vocabulary_size") if name in given}
        self.model: Architecture = replace(model, **sizes)
        self.samples: int = given.get("microbatch_size", 1)
        self.recompute = Recompute(given.get("recompute", Recompute.NONE))
        self.cluster = self._cluster()
        device = self.cluster.device
        if given.get("precision") == "bf16" and not device.bfloat16:
            raise InputError(f"--precision bf16: {device.name} computes it slowly. Use --precision fp16.")
        self.precision = Precision(given.get("precision", device.half), given.get("gradients", "float32"))
        software = SOFTWARE[given.get("software", PIPELOOM.name)]
        self.costs_of = CostModel(model=self.model, cluster=self.cluster, software=software)
        check_experts(self.model, given)
        self.inside.check(self.model.layer_sizes(self.samples, 1))

    def _cluster(self) -> Cluster:
        given, options = self._given, self._options
        if options.cluster is not None:
            if "device" in given:
                raise InputError(f"--device {given['device']}: does not work with --cluster. Remove one of them.")
            cluster = find_cluster(options.cluster, "--cluster")
        else:
            cluster = CLUSTERS[DEVICES[given.get("device", _DEVICE)]]
        for name in _RATES:
            if name in given and not (0 if name.endswith("latency") else 1e-30) <= given[name] <= (
                1 if name == "efficiency" else 1e30
            ):
                rule = "from 0" if name.endswith("latency") else "above 0"
                most = ", at most 1" if name == "efficiency" else ""
                raise InputError(f"--{name.replace('_', '-')} {given[name]:g}: must be {rule}{most}.")
        inside = {"node_bandwidth": "bytes_per_second", "node_latency": "latency_seconds"}
        between = {"network_bandwidth": "bytes_per_second", "network_latency": "latency_seconds"}
        first, second = (
            {to: given[name] for name, to in names.items() if name in given} for names in (inside, between)
        )
        if "bytes_per_second" in second:
            second["sum_bytes_per_second"] = None
        if "bytes_per_second" in first:  # all of it between two devices too
            first["pair_bytes_per_second"] = first["bytes_per_second"]
        device = cluster.device
        if "peak" in given:
            device = replace(device, operations_per_second=given["peak"], fp32_operations_per_second=None)
        return replace(
            cluster,
            device=device,
            inside_node=replace(cluster.inside_node, **first),
            between_nodes=replace(cluster.between_nodes, **second),
            efficiency=given.get("efficiency", cluster.efficiency),
            devices_per_node=given.get("devices_per_node", cluster.devices_per_node),
        )

    def configuration(self, schedule: Schedule | None = None) -> Configuration:
        """All degrees and options; with a schedule, also the blocks of its stages."""
        options, given = self._options, self._given
        return Configuration(
            schedule=schedule.name if schedule else "1f1b",
            pipeline=options.ranks,
            microbatches=options.microbatches,
            microbatch_size=self.samples,
            slices=schedule.num_slices if schedule else 1,
            data=options.data or 1,
            strategy=DataStrategy(options.data_strategy or DataStrategy.DDP),
            granularity=Granularity(options.data_granularity or Granularity.STEP),
            inside=self.inside,
            recompute=self.recompute,
            precision=self.precision,
            optimizer=given.get("optimizer", "adamw"),
            blocks=self._blocks(schedule.num_stages) if schedule else None,
            order=_order(given.get("order")),
            imbalance=given.get("expert_imbalance", 1.0),
            offload=options.offload,
        )

    def _blocks(self, num_stages: int) -> tuple[int, ...]:
        """The number of blocks per stage: as ``--blocks`` says, else even numbers."""
        words = self._given.get("blocks")
        if words is None:
            return tuple(even_blocks(self.model.layers, num_stages))
        if re.fullmatch(r"\d+(,\d+)*", words, re.ASCII) is None:
            raise InputError(f"--blocks {words}: must be the blocks of each stage, such as 5,6,6,5.")
        blocks = tuple(map(int, words.split(",")))
        if len(blocks) != num_stages or sum(blocks) != self.model.layers:
            raise InputError(
                f"--blocks {words}: must be the blocks of {num_stages} stages, {self.model.layers} together. Change it."
            )
        return blocks

    @property
    def replicas(self) -> int:
        """Processes with the same parameters, along dp and cp."""
        return (self._options.data or 1) * self.inside.context

    @cached_property
    def network(self) -> Network:
        """The links between stages, and between processes with the same parameters."""
        return self.costs_of.network(self.configuration())

    def data_axis(self) -> DataAxis:
        """The replicas of parameters."""
        return self.configuration().data_axis()

    def memory_model(self, schedule: Schedule) -> MemoryModel:
        """The layers of every stage on one process."""
        return self.costs_of.memory_model(self.configuration(schedule))

    def costs(self, schedule: Schedule) -> Costs:
        """Seconds and bytes of every stage."""
        return self.costs_of.costs(self.configuration(schedule))

    def timeline(self, schedule: Schedule, program: Program | Schedule, costs: Costs, network: Network) -> Timeline:
        """A simulated step, without the update."""
        return self.costs_of.timeline(self.configuration(schedule), program, costs, network)

    def answer(self, schedule: Schedule, program: Program | Schedule, timeline: Timeline) -> dict[str, Any]:
        """The numbers of ``--json`` that a model adds."""
        of, costs = self.configuration(schedule), self.costs_of
        if not isinstance(program, Program):
            program = lower(schedule, data=self.data_axis())
        ranks = memory_of_ranks(program, costs.memory_model(of))
        update = costs.update_seconds(of, schedule.placement.stages_of)
        step, devices = timeline.makespan + update, of.devices
        tokens = of.batch_size * self.model.sequence_length
        work = costs.times(of, self.recompute).operations() / of.microbatch_size * of.batch_size
        return {
            "model": self.model.name,
            "devices": devices,
            "update_seconds": update,
            **self._bound(of, schedule),
            "step_seconds": step,
            "tokens_per_second": tokens / step,
            "operations_per_device_second": work / step / devices,
            "peak_fraction": work / step / devices / self.cluster.device.peak(of.element),
            "collective_seconds": self._collective_seconds(),
            **self._of_experts(),
            "memory": [{"rank": rank.rank, **rank.kinds, "peak": rank.peak} for rank in ranks],
        }

    def _bound(self, of: Configuration, schedule: Schedule) -> dict[str, float]:
        """The lower bound of a step, unless options change the times of computations."""
        changed = self._options.slow_rank or self._options.overlap != 1
        return {} if changed else {"least_step_seconds": step_bound(self.costs_of, of, schedule)}

    def planned(self, schedule: Schedule, answer: dict[str, Any]) -> dict[str, Any]:
        """What a plan says of the model: how stages are shared, and the predictions of `answer`."""
        inside, model = self.inside, self.model
        return {
            **plan_fields(inside),
            "precision": self.precision.dtype,
            "recompute": str(self.recompute),
            "batch_size": self.samples * schedule.num_microbatches * (self._options.data or 1),
            "predicted_step_seconds": answer["step_seconds"],
            "predicted_memory_bytes": tuple(float(row["peak"]) for row in answer["memory"]),
            "why": (
                f"Times and memory are those of {model.name} with {model.sequence_length} tokens per sample on "
                f"{answer['devices']:,} devices {self.cluster.device.name}.",
            ),
        }

    def _collective_seconds(self, *, experts: bool = False) -> dict[str, float]:
        """Seconds of the collectives of one block, in F and in I, without overlap."""
        times = self.costs_of.times(self.configuration(), self.recompute)
        forward, backward = times.collectives(times.block_traffic(experts=experts))
        return {"forward": forward, "backward": backward}

    def _of_experts(self) -> dict[str, Any]:
        """What ``--json`` has of a mixture: parameters, and collectives of a block with experts."""
        model = self.model
        if model.experts is None:
            return {}
        blocks = [model.has_experts(index) for index in range(model.layers)]
        idle = sum(
            model.block_numbers(experts=True, all_experts=True) - model.block_numbers(experts=True)
            for has in blocks
            if has
        )
        parameters = num_parameters(transformer_layers(model, 1, 2))
        return {
            "parameters": parameters,
            "active_parameters": parameters - idle,
            "expert_blocks": sum(blocks),
            "expert_collective_seconds": self._collective_seconds(experts=True),
        }


def _order(words: str | None) -> tuple[str, ...]:
    """All mesh axes, outermost first; those that ``--order`` does not name are innermost. Raises InputError."""
    if words is None:
        return ORDER
    names = words.split(",")
    if not set(names) <= set(ORDER) or len(set(names)) < len(names):
        raise InputError(f"--order {words}: must be different axes of {', '.join(ORDER)}, outermost first.")
    return (*names, *(name for name in ORDER if name not in names))


def print_model(answer: dict[str, Any]) -> None:
    """Print the numbers of `SimulatedModel.answer`."""
    rate, step = answer["operations_per_device_second"] / 1e12, seconds_text(answer["step_seconds"])
    print(
        f"{answer['schedule']}: {answer['model']} on {answer['devices']:,} devices: {step} per step, "
        f"{number_text(answer['tokens_per_second'])} tokens/s, {rate:.0f} TFLOP/s per device "
        f"({answer['peak_fraction']:.1%} of the peak)"
    )
    if "active_parameters" in answer:
        whole, active = (number_text(answer[name]) for name in ("parameters", "active_parameters"))
        print(f"{answer['schedule']}: {whole} parameters, {active} of them per token")
    rows = answer["memory"]
    columns = [kind for kind in KINDS if any(row[kind] for row in rows)] + ["peak"]
    table = [["", *columns], *([f"rank {row['rank']}", *(bytes_text(row[kind]) for kind in columns)] for row in rows)]
    print("\n".join(table_lines(table, left=[0])))
