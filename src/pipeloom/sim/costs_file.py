"""The costs file: measured costs of a model, as JSON.

    {"stages": [{"forward": 0.01, "backward_input": 0.01, "backward_weight": 0.008,
                 "activation_bytes": 1000000, "weight_gradient_bytes": 400000}, ...],
     "latency": 0.0005,
     "memory_cap_bytes": [8000000, 8000000],
     "links": [{"ranks": [[0, 1], [1, 0]], "bytes_per_second": 1e9}], "overlap_communication": true}

Times are seconds of one micro-batch on one stage. `latency` is one number or a table with one row per source rank;
default 0. `memory_cap_bytes` has one cap on activations per rank; null or absent means no limit. All byte counts are
optional. `parameter_bytes` is the size of one version of a stage's parameters.

Bandwidths are optional. They need `message_bytes` of each stage, sent to the next stage; `gradient_message_bytes`,
sent back, default to the same. A link transfers the messages of all its pairs of source and target rank one at a time.
`bytes_per_second` of the file is the bandwidth of each pair in no link. If `overlap_communication` is false, both ranks
of a message are busy during its transfer.

For a data axis, `data_bytes_per_second` is the bandwidth of a rank to the same rank of other replicas,
`data_latency_seconds` the latency per message, `data_sum_bytes_per_second` the bandwidth of reductions, and
`data_slowdown` the fraction of speed that computations lose during collectives. Stages may have `gradient_bytes` in
addition to `parameter_bytes`, and `units`, the number of units in which they are gathered and reduced.
`memory_bytes_per_second` is the bandwidth to the offload target of activations.
"""

from dataclasses import dataclass, fields
from typing import Any

from pipeloom.common.json_reader import Entry, read_json
from pipeloom.errors import InputError
from pipeloom.sim.costs import SIZES, Costs
from pipeloom.sim.network import Link, Network

_TIMES = ("forward", "backward_input", "backward_weight")
_BESIDE = tuple(each.name for each in fields(Network) if each.name.startswith(("data_", "memory_")))
_OPTIONAL = (*SIZES, "units")  # of stages
_ENTRIES = ("stages", "latency", "memory_cap_bytes", "links", "bytes_per_second", "overlap_communication", *_BESIDE)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostsFile:
    """The contents of a costs file.

    Attributes:
        costs: costs of every stage.
        network: latencies and bandwidths.
        memory_caps: bytes of activations that each rank may hold; None for no limit.
    """

    costs: Costs
    network: Network
    memory_caps: tuple[float, ...] | None

    @property
    def num_stages(self) -> int:
        return len(self.costs.forward) if isinstance(self.costs.forward, tuple) else 1


def parse_costs(text: str) -> CostsFile:
    """Read the JSON of a costs file.

    Raises:
        InputError: an invalid entry; the message has its name, value and rule.
    """
    root = read_json(text, "the costs file", "an object with stages, latency, memory_cap_bytes")
    data = root.fields(("stages",), _ENTRIES[1:])
    stages = [stage.fields(_TIMES, _OPTIONAL) for stage in data["stages"].members()]
    if not stages:
        data["stages"].refuse("must have an entry per stage")
    for number, stage in enumerate(stages):
        if odd := sorted(set(stage) ^ set(stages[0])):
            raise InputError(
                f"{root.source}: key {odd[0]!r} is in only one of stages[0] and stages[{number}]: all stages need the "
                "same keys. Add it to all, or remove it."
            )
    columns: dict[str, Any] = {
        what: tuple(stage[what].whole(least=1) if what == "units" else stage[what].number() for stage in stages)
        for what in (*_TIMES, *_OPTIONAL)
        if what in stages[0]
    }
    caps = None
    if "memory_cap_bytes" in data and data["memory_cap_bytes"].value is not None:
        caps = tuple(cap.number() for cap in data["memory_cap_bytes"].members())
        if "activation_bytes" not in columns:
            raise InputError(
                "memory_cap_bytes has no effect without activation_bytes. Add activation_bytes per stage, or remove "
                "memory_cap_bytes."
            )
    return CostsFile(costs=Costs(**columns), network=_network(data, "message_bytes" in columns), memory_caps=caps)


def _network(data: dict[str, Entry], sized: bool) -> Network:
    links = []
    for link in data["links"].members() if "links" in data else ():
        entries = link.fields(("ranks", "bytes_per_second"))
        pairs = (pair.members(length=2) for pair in entries["ranks"].members())
        ranks = frozenset((source.whole(), target.whole()) for source, target in pairs)
        links.append(Link(ranks=ranks, bytes_per_second=entries["bytes_per_second"].number()))
    known: dict[str, Any] = {what: data[what].number() for what in _BESIDE if what in data}
    if "bytes_per_second" in data and data["bytes_per_second"].value is not None:
        known["bytes_per_second"] = data["bytes_per_second"].number()
    if (links or "bytes_per_second" in known) and not sized:
        raise InputError(
            "the costs have bandwidths, but no message_bytes. Add message_bytes per stage, or remove the bandwidths."
        )
    if "overlap_communication" in data:
        known["overlap_communication"] = data["overlap_communication"].flag()
    if "latency" in data:
        latency = data["latency"]
        is_table = isinstance(latency.value, list)  # with a row for each source rank
        rows = latency.members() if is_table else ()
        table = tuple(tuple(each.number() for each in row.members()) for row in rows)
        known["latency_seconds"] = table if is_table else latency.number()
    return Network(links=tuple(links), **known)
