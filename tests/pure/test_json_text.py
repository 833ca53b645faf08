"""Every reader of JSON names the key, what was seen and the rule; numbers are what they should be."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from pipeloom import schedules
from pipeloom.common.json_reader import Entry
from pipeloom.errors import InputError
from pipeloom.ir import DataAxis, DataStrategy
from pipeloom.ir.text import from_json, program_from_json, program_to_json, to_json
from pipeloom.passes import lower
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
    "program": (program_from_json, json.loads(program_to_json(lower(SCHEDULE, data=DataAxis(degree=2))))),
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
    with pytest.raises(InputError, match=f"the key '{next(iter(good))}' stands twice"):
        read(text.replace("{", f'{{"{next(iter(good))}": 1, ', 1))


@pytest.mark.parametrize(
    ("name", "path", "value", "said"),
    [
        ("schedule", "num_slices", 1.5, "num_slices of the schedule is 1.5: it is a whole number"),
        ("schedule", "num_microbatches", True, "num_microbatches of the schedule is True: it is a whole number"),
        ("schedule", "num_microbatches", "3", "num_microbatches of the schedule is '3': it is a whole number"),
        ("schedule", "forward_only", 0, "forward_only of the schedule is 0: it is true or false"),
        ("schedule", "name", 1, "name of the schedule is 1: it is text"),
        ("schedule", "weights", "fresh", "weights of the schedule is 'fresh': it is one of flush, stash"),
        ("schedule", "weights", [], "weights of the schedule is []: it is one of flush, stash"),
        ("schedule", "placement/0/0", 0.5, "rank 0 of stage 0 of placement of the schedule is 0.5"),
        ("schedule", "placement/0", 0, "stage 0 of placement of the schedule is 0: it is a list"),
        ("schedule", "orders/1", ["1F0"], "order 1 of orders of the schedule is ['1F0']: it is text"),
        ("schedule", "orders/1", "zero", "'zero' is no action"),
        ("schedule", "overlapped", [["0F0"]], "pair 0 of overlapped of the schedule is ['0F0']: it is a list of 2"),
        ("schedule", "microbatches_per_update", 2.5, "microbatches_per_update of the schedule is 2.5"),
        ("schedule", "num_slice", 2, "the schedule has a key 'num_slice': its keys are name, num_microbatches"),
        ("program", "schedule/num_slices", 1.5, "num_slices of schedule of the program is 1.5"),
        ("program", "data/degree", 1.5, "degree of data of the program is 1.5"),
        ("program", "data/strategy", "zero4", "strategy of data of the program is 'zero4': it is one of ddp"),
        ("program", "gradient_groups", [[0.5]], "stage 0 of group 0 of gradient_groups of the program is 0.5"),
        ("costs", "stages/0/units", 1.5, "units of stage 0 of the costs file is 1.5"),
        ("costs", "stages/0/forward", float("nan"), "forward of stage 0 of the costs file is nan"),
        ("costs", "stages/0/forward", float("inf"), "forward of stage 0 of the costs file is inf"),
        ("costs", "stages/0/forward", False, "forward of stage 0 of the costs file is False"),
        ("slices", "forward/base/0/1", float("nan"), "entry 1 of point 0 of base of forward of the file of costs of"),
        ("slices", "latency", True, "latency of the file of costs of slices is True"),
        ("profile", "version", 1.5, "version of the profile is 1.5: it is a whole number"),
        ("profile", "layers/0/forward_seconds", float("inf"), "forward_seconds of layer 0 of the profile is inf"),
        ("profile", "layers/0/forward_seconds", True, "forward_seconds of layer 0 of the profile is True"),
        ("cluster", "devices_per_node", 2.5, "devices_per_node of the cluster file is 2.5"),
        ("cluster", "efficiency", float("nan"), "efficiency of the cluster file is nan"),
        ("timeline", "num_slices", 1.5, "num_slices is 1.5: it is a whole number"),
        ("timeline", "ideal_seconds", float("nan"), "ideal_seconds is nan: it is a finite number"),
        ("timeline", "spans/0/0/2", float("nan"), "it has times that are not finite"),
        ("timeline", "memory/0/0/0", float("inf"), "it has times that are not finite"),
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
        ({"rank": 0.5}, "rank of process 0 of .*memory.json is 0.5"),
        ({"predicted": {"parameters": float("nan")}}, "parameters of predicted of process 0 of .* is nan"),
        ({"predicted": {"sweets": 1}}, "has a key 'sweets'"),
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
