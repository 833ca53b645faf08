"""`pipeloom simulate --model`: times and memory of a transformer on a named device, for a layout inside its stages."""

from dataclasses import replace
from functools import cached_property, partial
from typing import Any, get_args

from pipeloom.cli.common.expert_options import EXPERTS, add_expert_options, check_experts, with_experts
from pipeloom.cli.common.inside_options import LAYOUT, add_inside_options, inside_of, plan_fields
from pipeloom.cli.common.parser import Parser
from pipeloom.common.json_reader import parse_file
from pipeloom.common.quantities import BytesPerSecond, bytes_text, number_text, seconds_text, table_lines
from pipeloom.errors import InputError
from pipeloom.ir import DataAxis, DataStrategy, Granularity, Program, Schedule
from pipeloom.ir.recompute import Recompute
from pipeloom.parallel.options import DType, Precision
from pipeloom.passes import lower
from pipeloom.plan.architecture import Architecture
from pipeloom.plan.cluster import CLUSTERS, Cluster, data_links, device_link, parse_cluster
from pipeloom.plan.memory import (
    KINDS,
    OPTIMIZERS,
    LayerMemory,
    MemoryModel,
    memory_of_ranks,
    num_parameters,
    transformer_layers,
)
from pipeloom.plan.memory.choose import stage_bytes
from pipeloom.plan.named_architectures import NAMED, find_architecture
from pipeloom.plan.stage_times import StageTimes
from pipeloom.sim import Costs, Network, Timeline
from pipeloom.sim.costs import MOST_UNITS
from pipeloom.split.chain_partition import consecutive, even_parts

_RATES = ("peak", "efficiency", "node_bandwidth", "network_bandwidth", "node_latency", "network_latency")
MODEL_OPTIONS = (
    *LAYOUT,
    *EXPERTS,
    *_RATES,
    *("sequence_length", "vocabulary_size", "microbatch_size", "recompute", "precision", "optimizer", "device"),
    "devices_per_node",
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
    option("--precision", choices=get_args(DType), help="number format of parameters (default: bf16)")
    option("--optimizer", choices=list(OPTIMIZERS), help="optimizer, for memory (default: adamw)")
    option("--device", choices=list(CLUSTERS), help=f"device and links, without --cluster (default: {_DEVICE})")
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
        self.precision = Precision(given.get("precision", "bf16"))
        self.samples: int = given.get("microbatch_size", 1)
        self.recompute = Recompute(given.get("recompute", Recompute.NONE))
        self.cluster = self._cluster()
        self.times = StageTimes(
            model=self.model,
            inside=self.inside,
            cluster=self.cluster,
            samples=self.samples,
            element=2 if self.precision.has_masters else 4,
            recompute=self.recompute,
            imbalance=given.get("expert_imbalance", 1.0),
            devices_per_replica=options.ranks * self.inside.processes,
        )
        check_experts(self.model, given)
        self.inside.check(self.model.layer_sizes(self.samples, 1))

    def _cluster(self) -> Cluster:
        given, options = self._given, self._options
        if options.cluster is not None:
            if "device" in given:
                raise InputError(f"--device {given['device']}: does not work with --cluster. Remove one of them.")
            cluster: Cluster = parse_file("--cluster", options.cluster, parse_cluster)
        else:
            cluster = CLUSTERS[given.get("device", _DEVICE)]
            if self.precision.dtype == "fp32" and "peak" not in given:
                raise InputError("--precision fp32: named devices have the peak of bf16. Add --peak.")
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
        device = replace(cluster.device, operations_per_second=given.get("peak", cluster.device.operations_per_second))
        return replace(
            cluster,
            device=device,
            inside_node=replace(cluster.inside_node, **first),
            between_nodes=replace(cluster.between_nodes, **second),
            efficiency=given.get("efficiency", cluster.efficiency),
            devices_per_node=given.get("devices_per_node", cluster.devices_per_node),
        )

    @property
    def replicas(self) -> int:
        """Processes with the same parameters, along dp and cp."""
        return (self._options.data or 1) * self.inside.context

    @cached_property
    def network(self) -> Network:
        """The links between stages, and between processes with the same parameters.

        Processes of a stage follow each other, then stages, then replicas.
        """
        stage, options = self.inside.processes, self._options
        link = device_link(self.cluster, stage * options.ranks)
        found = data_links(self.cluster, devices=stage * options.ranks, replicas=self.replicas)
        return Network(bytes_per_second=link.bytes_per_second, latency_seconds=link.latency_seconds, **found)

    def data_axis(self) -> DataAxis:
        """The replicas of parameters."""
        options = self._options
        return DataAxis(
            degree=self.replicas,
            strategy=DataStrategy(options.data_strategy or DataStrategy.DDP),
            granularity=Granularity(options.data_granularity or Granularity.STEP),
            separate_master=self.precision.has_masters,
        )

    def _blocks(self, num_stages: int) -> list[int]:
        """Blocks per stage. Where there are more stages than blocks, the first has none, then the last."""
        layers = self.model.layers
        if num_stages <= layers:
            return even_parts(layers, num_stages)
        if num_stages > layers + 2:
            raise InputError(
                f"{num_stages} stages for {layers} layers: must be at most {layers + 2}. Use fewer chunks."
            )
        return [0, *[1] * (num_stages - 2), 1 if num_stages == layers + 1 else 0]

    def memory_model(self, num_stages: int) -> MemoryModel:
        """The layers of every stage on one process."""
        element = 2 if self.precision.has_masters else 4
        layers = transformer_layers(self.model, self.samples, element, self.inside, self.times.imbalance)
        return MemoryModel(
            stages=_in_stages(layers, self._blocks(num_stages)),
            precision=self.precision,
            optimizer=self._given.get("optimizer", "adamw"),
            recompute=(self.recompute,) * num_stages,
            expert=self.inside.expert,
        )

    def costs(self, num_stages: int) -> Costs:
        """Seconds and bytes of every stage."""
        stages, memory = self.times.stages(self._blocks(num_stages)), self.memory_model(num_stages)
        parameters, gradients = stage_bytes(memory, self.replicas)
        return Costs(
            forward=tuple(each.forward for each in stages),
            backward_input=tuple(each.backward_input for each in stages),
            backward_weight=tuple(each.backward_weight for each in stages),
            message_bytes=(self.times.message_bytes(),) * num_stages,
            activation_bytes=tuple(memory.kept_bytes(stage) for stage in range(num_stages)),
            parameter_bytes=parameters,
            gradient_bytes=gradients,
            units=tuple(min(MOST_UNITS, len(stage)) for stage in memory.stages),
        )

    def answer(self, schedule: Schedule, program: Program | Schedule, timeline: Timeline) -> dict[str, Any]:
        """The numbers of ``--json`` that a model adds."""
        memory = self.memory_model(schedule.num_stages)
        if not isinstance(program, Program):
            program = lower(schedule, data=self.data_axis())
        ranks = memory_of_ranks(program, memory)
        shards = self.replicas if self.data_axis().strategy.shards_optimizer else 1
        held = [
            sum(sum(layer.parameter_sizes.values()) for stage in stages for layer in memory.stages[stage])
            for stages in schedule.placement.stages_of
        ]
        update = self.times.update_seconds(max(held) / shards)
        step = timeline.makespan + update
        devices = schedule.num_ranks * self.inside.tensor * self.replicas
        tokens = self.times.tokens * schedule.num_microbatches * (self._options.data or 1)
        work = self.times.operations() * schedule.num_microbatches * (self._options.data or 1)
        return {
            "model": self.model.name,
            "devices": devices,
            "update_seconds": update,
            "step_seconds": step,
            "tokens_per_second": tokens / step,
            "operations_per_device_second": work / step / devices,
            "peak_fraction": work / step / devices / self.cluster.device.operations_per_second,
            "collective_seconds": self._collective_seconds(),
            **self._of_experts(),
            "memory": [{"rank": rank.rank, **rank.kinds, "peak": rank.peak} for rank in ranks],
        }

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
        forward, backward = self.times.collectives(self.times.block_traffic(experts=experts))
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


def _in_stages(layers: list[LayerMemory], blocks: list[int]) -> list[list[LayerMemory]]:
    """Stages with these numbers of blocks, the first with the embedding and the last with norm and head."""
    found = consecutive(layers[1:-2], blocks)
    found[0].insert(0, layers[0])
    found[-1] += layers[-2:]
    return found


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
