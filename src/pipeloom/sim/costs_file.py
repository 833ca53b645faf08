"""The costs file: what was measured of a model, as JSON.

    {"stages": [{"forward": 0.01, "backward_input": 0.01, "backward_weight": 0.008,
                 "activation_bytes": 1000000, "weight_gradient_bytes": 400000}, ...],
     "latency": 0.0005,
     "memory_cap_bytes": [8000000, 8000000],
     "links": [{"ranks": [[0, 1], [1, 0]], "bytes_per_second": 1e9}], "overlap_communication": true}

Times are seconds of one micro-batch on one stage. `latency` is one number or a table with a row for each source rank,
and 0 if left out. `memory_cap_bytes` has one number a rank, or is null or left out; it limits activations. The
bytes may be left out of all stages. `parameter_bytes` are those of one version of a stage's parameters.

Bandwidth may be left out. With it, each stage has `message_bytes`, which go to the next stage, and may have
`gradient_message_bytes`, which come back (as many if left out). A link transfers the messages of all its pairs of
source and target rank one after the other; `bytes_per_second` beside `links` is the bandwidth of every pair that is in
none. `overlap_communication` false keeps both ranks of a message busy while it is transferred.

Of a data axis, `data_bytes_per_second` is the bandwidth of a rank to its like in other copies of the pipeline, and
`data_latency_seconds` what a message between them takes beside that; `data_sum_bytes_per_second` is the bandwidth while
gradients are summed, and `data_slowdown` the part of their speed that computations lose while collectives run beside
them. Stages may have `gradient_bytes` beside `parameter_bytes`, and `units`: in so many pieces they are gathered and
reduced. `memory_bytes_per_second` is the bandwidth to the memory to which activations are moved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeloom.errors import InputError
from pipeloom.ir.json_text import load_json
from pipeloom.sim.costs import SIZES, Costs
from pipeloom.sim.network import Link, Network

_TIMES = ("forward", "backward_input", "backward_weight")
_BESIDE = (
    "data_bytes_per_second",
    "data_sum_bytes_per_second",
    "data_latency_seconds",
    "data_slowdown",
    "memory_bytes_per_second",
)
_OPTIONAL = (*SIZES, "units")  # of stages
_ENTRIES = ("stages", "latency", "memory_cap_bytes", "links", "bytes_per_second", "overlap_communication", *_BESIDE)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostsFile:
    """A costs file that was read.

    Attributes:
        costs: of every stage.
        network: latencies.
        memory_caps: bytes that each rank may hold; None if nothing limits them.
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
        InputError: it is not one; the message names the entry and the rule.
    """
    try:
        data = load_json(text)
    except ValueError as error:
        raise InputError(
            f"costs are no JSON ({error}): write an object with stages, latency, memory_cap_bytes"
        ) from error
    if not isinstance(data, dict) or not isinstance(data.get("stages"), list) or not data["stages"]:
        raise InputError('costs have no list of stages: write {"stages": [{"forward": ..., ...}, ...], ...}')
    unknown = sorted(set(data) - set(_ENTRIES))
    if unknown:
        raise InputError(f"costs have an entry {unknown[0]!r}: the entries are {', '.join(_ENTRIES)}; drop it")
    stages = data["stages"]
    for number, stage in enumerate(stages):
        if not isinstance(stage, dict) or (
            odd := sorted(set(stage) ^ {*_TIMES, *(k for k in _OPTIONAL if k in stages[0])})
        ):
            what = f"entry {odd[0]!r} is missing or odd" if isinstance(stage, dict) else "it is no object"
            raise InputError(
                f"stage {number} of the costs: {what}; each stage has {', '.join(_TIMES)}, and all or none have "
                f"each of {', '.join(_OPTIONAL)}"
            )
    columns: dict[str, Any] = {
        what: tuple(_number(f"{what} of stage {number}", stage[what]) for number, stage in enumerate(stages))
        for what in (*_TIMES, *_OPTIONAL)
        if what in stages[0]
    }
    if "units" in columns:
        columns["units"] = tuple(int(count) if count == int(count) else count for count in columns["units"])
    caps = data.get("memory_cap_bytes")
    if caps is not None:
        if not isinstance(caps, list):
            raise InputError("memory_cap_bytes of the costs is no list: give one number a rank, or null")
        if "activation_bytes" not in columns:
            raise InputError(
                "memory_cap_bytes limit nothing without activation_bytes of the stages; add them, or drop it"
            )
        caps = tuple(_number(f"memory_cap_bytes of rank {rank}", cap) for rank, cap in enumerate(caps))
    return CostsFile(costs=Costs(**columns), network=_network(data, "message_bytes" in columns), memory_caps=caps)


def _network(data: dict[str, Any], sized: bool) -> Network:
    links, bandwidth = data.get("links", []), data.get("bytes_per_second")
    overlap = data.get("overlap_communication", True)
    if not isinstance(links, list):
        raise InputError("links of the costs are no list: give objects with ranks and bytes_per_second, or drop it")
    if not isinstance(overlap, bool):
        raise InputError(f"overlap_communication of the costs is {overlap!r}: it is true or false; correct it")
    if (links or bandwidth is not None) and not sized:
        raise InputError("the costs have bandwidths, but the stages no message_bytes: add them to each, or drop links")
    return Network(
        latency_seconds=_latency(data.get("latency", 0.0)),
        bytes_per_second=None if bandwidth is None else _number("bytes_per_second", bandwidth),
        links=tuple(_link(number, link) for number, link in enumerate(links)),
        overlap_communication=overlap,
        **{what: _number(what, data[what]) for what in _BESIDE if what in data},
    )


def _link(number: int, link: Any) -> Link:
    if not isinstance(link, dict) or set(link) != {"ranks", "bytes_per_second"} or not isinstance(link["ranks"], list):
        raise InputError(f'link {number} of the costs: write {{"ranks": [[source, target]], "bytes_per_second": n}}')
    for pair in link["ranks"]:
        if not (isinstance(pair, list) and len(pair) == 2 and all(type(rank) is int for rank in pair)):
            raise InputError(f"link {number} of the costs joins {pair!r}: a pair is a source and a target; correct it")
    bandwidth = _number(f"bytes_per_second of link {number}", link["bytes_per_second"])
    return Link(ranks=frozenset((source, target) for source, target in link["ranks"]), bytes_per_second=bandwidth)


def _latency(latency: Any) -> float | tuple[tuple[float, ...], ...]:
    if not isinstance(latency, list):
        return _number("latency", latency)
    if not all(isinstance(row, list) for row in latency):
        raise InputError("latency of the costs is neither a number nor a table: give a row for each source rank")
    return tuple(
        tuple(_number(f"latency from rank {source} to {target}", seconds) for target, seconds in enumerate(row))
        for source, row in enumerate(latency)
    )


def _number(what: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise InputError(f"{what} of the costs is {value!r}: it is a finite number, 0 or more; correct it")
    return float(value)
