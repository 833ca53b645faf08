"""Every reader of JSON names the key, what was seen and the rule; numbers are what they should be."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from pipeloom import schedules
from pipeloom.common.json_reader import Entry
from pipeloom.errors import InputError
from pipeloom.ir import DataStrategy
from pipeloom.ir.text import from_json, to_json
from pipeloom.plan.cluster import parse_cluster
from pipeloom.plan.memory import read_memory
from pipeloom.plan.partition import parse_profile
from pipeloom.plan.slicing import parse_slice_costs
from pipeloom.sim import Costs, Timeline, parse_costs, simulate

SCHEDULE = schedules.one_f_one_b(num_ranks=2, num_microbatches=3)
LAYER = {"name": "a", "forward_seconds": 1, "backward_seconds": 2, "activation_bytes": 3, "parameter_bytes": 4}
PHASE = {"base": [[8, 1.0]], "context": [0, 0, 0, 0]}
NETWORK = {"bytes_per_second": 1e9, "latency_seconds": 0}
FILES: dict[str, tuple[Callable[[str], object], Any]] = {
    "schedule": (from_json, json.loads(to_json(SCHEDULE))),
    "costs": (
        parse_costs,
        {"stages": [{"forward": 1, "backward_input": 1, "backward_weight": 1, "units": 2, "parameter_bytes": 8}]},
    ),
    "slices": (parse_slice_costs, {"forward": PHASE, "backward": PHASE, "latency": 0}),
    "profile": (parse_profile, {"version": 1, "layers": [LAYER]}),
    "cluster": (
        parse_cluster,
        {
            "name": "x",
            "devices_per_node": 8,
            "device": {"name": "d", "operations_per_second": 1, "memory_bytes_per_second": 1, "launch_seconds": 0},
            "inside_node": {**NETWORK, "pair_bytes_per_second": 1},
            "between_nodes": NETWORK,
            "efficiency": 0.5,
        },
    ),
    "timeline": (Timeline.from_json, json.loads(simulate(SCHEDULE, Costs.uniform()).to_json())),
}


def changed(name: str, path: str, value: object) -> str:
    data = json.loads(json.dumps(FILES[name][1]))
    *parents, last = [int(part) if part.isdecimal() else part for part in path.split("/")]
    part = data
    for parent in parents:
        part = part[parent]
    part[last] = value
    return json.dumps(data)


@pytest.mark.parametrize("name", FILES)
def test_good_files_are_read_and_a_key_twice_is_refused(name: str) -> None:
    read, good = FILES[name]
    text = json.dumps(good)
    read(text)
    with pytest.raises(InputError, match=f"duplicate key '{next(iter(good))}'"):
        read(text.replace("{", f'{{"{next(iter(good))}": 1, ', 1))


@pytest.mark.parametrize(
    ("name", "path", "value", "said"),
    [
        ("schedule", "num_slices", 1.5, "the schedule: num_slices=1.5: must be an integer"),
        ("schedule", "num_microbatches", True, "the schedule: num_microbatches=True: must be an integer"),
        ("schedule", "num_microbatches", "3", "the schedule: num_microbatches='3': must be an integer"),
        ("schedule", "forward_only", 0, "the schedule: forward_only=0: must be true or false"),
        ("schedule", "name", 1, "the schedule: name=1: must be a string"),
        ("schedule", "weights", "fresh", "the schedule: weights='fresh': must be one of flush, stash"),
        ("schedule", "weights", [], "the schedule: weights=[]: must be one of flush, stash"),
        ("schedule", "placement/0/0", 0.5, "the schedule: placement[0][0]=0.5"),
        ("schedule", "placement/0", 0, "the schedule: placement[0]=0: must be a list"),
        ("schedule", "orders/1", ["1F0"], "the schedule: orders[1]=['1F0']: must be a string"),
        ("schedule", "orders/1", "zero", "'zero': an action is stage, op"),
        ("schedule", "overlapped", [["0F0"]], "the schedule: overlapped[0]=['0F0']: must be a list of length 2"),
        ("schedule", "microbatches_per_update", 2.5, "the schedule: microbatches_per_update=2.5"),
        ("schedule", "num_slice", 2, "the schedule: unknown key 'num_slice'. Remove it (keys name, num_microbatches"),
        ("costs", "stages/0/units", 1.5, "the costs file: stages[0].units=1.5"),
        ("costs", "stages/0/forward", float("nan"), "the costs file: stages[0].forward=nan"),
        ("costs", "stages/0/forward", float("inf"), "the costs file: stages[0].forward=inf"),
        ("costs", "stages/0/forward", False, "the costs file: stages[0].forward=False"),
        ("slices", "forward/base/0/1", float("nan"), "the slice costs file: forward.base[0][1]=nan"),
        ("slices", "latency", True, "the slice costs file: latency=True"),
        ("profile", "version", 1.5, "the profile: version=1.5: must be an integer"),
        ("profile", "layers/0/forward_seconds", float("inf"), "the profile: layers[0].forward_seconds=inf"),
        ("profile", "layers/0/forward_seconds", True, "the profile: layers[0].forward_seconds=True"),
        ("cluster", "devices_per_node", 2.5, "the cluster file: devices_per_node=2.5"),
        ("cluster", "efficiency", float("nan"), "the cluster file: efficiency=nan"),
        ("timeline", "num_slices", 1.5, "num_slices=1.5: must be an integer"),
        ("timeline", "ideal_seconds", float("nan"), "ideal_seconds=nan: must be a finite number"),
        ("timeline", "spans/0/0/2", float("nan"), "times must be finite"),
        ("timeline", "memory/0/0/0", float("inf"), "times must be finite"),
    ],
)
def test_what_is_wrong_is_named_in_one_line(name: str, path: str, value: object, said: str) -> None:
    with pytest.raises(InputError) as error:
        FILES[name][0](changed(name, path, value))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_the_memory_of_a_run_names_what_is_wrong(tmp_path) -> None:
    row = {"process": 0, "copy": 0, "rank": 0, "predicted": {"parameters": 4.0}, "measured": {"peak": None}}
    for change, said in (
        ({"rank": 0.5}, r"memory.json: processes\[0\].rank=0.5"),
        ({"predicted": {"parameters": float("nan")}}, r"memory.json: processes\[0\].predicted.parameters=nan"),
        ({"predicted": {"sweets": 1}}, "unknown key 'sweets'"),
    ):
        (tmp_path / "memory.json").write_text(json.dumps({"kinds": [], "processes": [row | change]}))
        with pytest.raises(InputError, match=said):
            read_memory(tmp_path)


def test_whole_numbers_may_be_written_as_others_are() -> None:
    assert Entry(8.0, "x").whole() == 8
    assert Entry(DataStrategy.ZERO1.value, "x").word(DataStrategy) is DataStrategy.ZERO1
    for value in (10**400, float("nan"), -1, None):
        with pytest.raises(InputError, match="x is"):
            Entry(value, "x").number()
        with pytest.raises(InputError, match="x is"):
            Entry(value, "x").whole()
