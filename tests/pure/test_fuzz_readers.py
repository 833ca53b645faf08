"""Every reader of files answers damaged input with one line of a PipeloomError, or reads it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom import schedules
from pipeloom.cli.train import parse
from pipeloom.common.recorded_file import FileRecord
from pipeloom.data.shards import read_lines
from pipeloom.errors import PipeloomError
from pipeloom.ir import check
from pipeloom.ir.text import format_orders, from_json, parse_orders, schedule_from_orders, to_json
from pipeloom.ir.torch_csv import from_csv, to_csv
from pipeloom.plan.cluster import parse_cluster
from pipeloom.plan.memory.memory_file import FILE, read_memory
from pipeloom.plan.named_architectures import parse_architecture
from pipeloom.plan.partition.graph_text import parse_graph
from pipeloom.plan.partition.profile import Profile, parse_profile
from pipeloom.plan.plan import Plan
from pipeloom.plan.slicing.slice_costs import parse_slice_costs
from pipeloom.report.run_files import (
    read_configuration,
    read_environment,
    read_metrics,
    read_rewinds,
    read_timelines,
)
from pipeloom.sim import parse_costs
from pipeloom.train.checkpoint.manifest import MANIFEST_NAME, SEAL_NAME, Manifest, Part, read_manifest, seal

EXAMPLES = os.environ.get("PIPELOOM_FUZZ_EXAMPLES")  # per reader; without it, few, and the same in every run
ROOT = Path(__file__).parents[2]
SCHEDULE = schedules.one_f_one_b(num_ranks=2, num_microbatches=3)
STAGE = {"forward": 1, "backward_input": 1, "backward_weight": 1, "activation_bytes": 6, "parameter_bytes": 8}
STEP = {"step": 1, "loss": 2.0, "grad_norm": 1.0, "lr": 0.1, "tokens_per_second": 9.0, "step_seconds": 0.1}


def manifest() -> str:
    files = {"model.safetensors": FileRecord(8, "0" * 64)}
    made = Manifest(
        step=3,
        layout={"ranks": 1},
        state={"a": 1},
        files=files,
        ties={"a": "b"},
        parts=(Part(model="model.safetensors"),),
    )
    return made.to_bytes().decode()


def in_file(name: str, read: Callable[[Path], object], *, directory: bool = False) -> Callable[[bytes], object]:
    """A reader of files, as one of their bytes."""

    def reader(content: bytes) -> object:
        with TemporaryDirectory() as home:
            path = Path(home) / name
            path.write_bytes(content)
            if name == MANIFEST_NAME:
                (Path(home) / SEAL_NAME).write_bytes(seal(content))
            return read(Path(home) if directory else path)

    return reader


def of_text(read: Callable[[str], object]) -> Callable[[bytes], object]:
    """Files are decoded by `pipeloom.common.json_reader.parse_file` before a reader of text gets them."""
    return lambda content: read(content.decode(errors="replace"))


def configuration(path: Path) -> object:
    try:
        return parse(["--config", str(path)])
    except SystemExit as error:  # one line on standard error
        return error


TIMELINE = json.dumps({
    "name": "x", "kind": "measured", "ideal_seconds": 1.0, "num_microbatches": 1, "num_slices": 1, "placement": [[0]],
    "spans": [[["0F0", 0.0, 1.0], ["0B0", 1.0, 2.0]]], "memory": [[[0.0, 0.0]]],
})  # fmt: skip
GRAPH = """\
node1 -- Input0 -- forward_compute_time=5.000, backward_compute_time=0.000, activation_size=8.0, parameter_size=0.000
node3 -- Linear(2, 2) -- forward_compute_time=2.0, backward_compute_time=4.0, activation_size=[3.0; 8.0], \
parameter_size=1
\tnode1 -- node3
"""
MEMORY = {"process": 0, "copy": 0, "rank": 0, "predicted": {"peak": 1}, "measured": {"peak": 2}}
READERS: dict[str, tuple[str, Callable[[bytes], object]]] = {
    "schedule.json": (to_json(SCHEDULE), of_text(lambda text: check(from_json(text)))),
    "schedule.csv": (to_csv(SCHEDULE), of_text(lambda text: check(from_csv(text)))),
    "orders": (
        format_orders(SCHEDULE.orders),
        of_text(lambda text: check(schedule_from_orders(parse_orders(text), name="own"))),
    ),
    "plan": (Plan(schedule="1f1b", pipeline=2, microbatches=4, cut=[3, 3]).to_json(), of_text(Plan.from_json)),
    "cluster": ((ROOT / "benchmarks/terapipe_paper/p3.16xlarge.json").read_text(), of_text(parse_cluster)),
    "model": (
        json.dumps({"layers": 2, "width": 8, "heads": 2, "vocabulary_size": 9, "sequence_length": 4}),
        of_text(parse_architecture),
    ),
    "profile": (
        Profile.of([("a", 1.0, 2.0, 3.0, 4.0), ("b", 1.0, 2.0, 3.0, 4.0)], edges=[(0, 1)]).to_json(),
        of_text(parse_profile),
    ),
    "graph.txt": (GRAPH, of_text(parse_graph)),
    "slice costs": (
        json.dumps({key: {"base": [[1, 0.1], [4, 0.2]], "context": [0, 1, 2, 3]} for key in ("forward", "backward")}),
        of_text(parse_slice_costs),
    ),
    "costs": (json.dumps({"stages": [STAGE, STAGE], "data_bytes_per_second": 2}), of_text(parse_costs)),
    "manifest": (manifest(), in_file(MANIFEST_NAME, read_manifest, directory=True)),
    "configuration": (
        "steps: 3\nmodel: {layers: 2, width: 8}\nschedule: gpipe\nparallel: {slices: 2}\n",
        in_file("c.yaml", configuration),
    ),
    "documents.jsonl": (
        '{"text": "a"}\n{"messages": [{"role": "user", "content": "b"}]}\n',
        in_file("d.jsonl", lambda path: [*read_lines(path)]),
    ),
    "metrics.jsonl": (
        json.dumps(STEP) + "\n" + json.dumps({"step": 1, "eval_loss": 2}) + "\n",
        in_file("metrics.jsonl", read_metrics),
    ),
    "timelines.json": (f'{{"measured": {TIMELINE}}}', in_file("timelines.json", read_timelines)),
    "rewinds.json": (
        '[{"checkpoint": 2, "step": 3, "spike": "loss 9, limit 5"}]',
        in_file("rewinds.json", read_rewinds),
    ),
    "environment.json": ('{"torch": "2"}', in_file("environment.json", read_environment)),
    "config.yaml": ("steps: 3\n", in_file("config.yaml", read_configuration)),
    "memory.json": (json.dumps({"kinds": [], "processes": [MEMORY]}), in_file(FILE, read_memory, directory=True)),
}  # fmt: skip
VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    7,
    1.5,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "0F0",
    [],
    {},
    [[]],
    {"a": 1},
]
PIECES = [
    *("null", "-1", "1e999", "9" * 5000, '""', "[]", "{}", "\\ud800", "\x00", "\ufeff", ",", ":", "\n", "0F9"),
    *("!!python/object:os.system", "&a [*a]", "\udcff"),
]


def damaged(draw: st.DrawFn, text: str) -> bytes:
    """`text` with a value of its JSON replaced or removed, or with some characters replaced."""
    if draw(st.booleans()):
        try:
            data = json.loads(text)
        except ValueError:
            data = None
        if data is not None:
            return json.dumps(changed(draw, data)).encode()
    first = draw(st.integers(0, len(text)))
    last = draw(st.integers(first, min(len(text), first + 9)))
    piece = draw(st.sampled_from([*PIECES, text[:40]]) | st.text(max_size=3))
    return (text[:first] + piece + text[last:]).encode(errors="surrogatepass")


def changed(draw: st.DrawFn, value: Any) -> Any:
    """JSON with another value at one place."""
    if not isinstance(value, dict | list) or not value or draw(st.integers(0, 5)) == 0:
        return draw(st.sampled_from(VALUES))
    keys = [*value] if isinstance(value, dict) else [*range(len(value))]
    key = draw(st.sampled_from(keys))
    copy = value.copy()
    if draw(st.integers(0, 5)) == 0:
        del copy[key]
    else:
        copy[key] = changed(draw, value[key])
    return copy


def refusal(read: Callable[[bytes], object], content: bytes) -> str | None:
    try:
        read(content)
    except PipeloomError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", READERS)
def test_readers_read_their_own_files(name: str) -> None:
    text, read = READERS[name]
    assert not isinstance(read(text.encode()), SystemExit)


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=int(EXAMPLES or 40), deadline=None, derandomize=EXAMPLES is None, database=None)
@given(data=st.data())
def test_a_damaged_file_is_read_or_refused_in_one_line(name: str, data: st.DataObject) -> None:
    text, read = READERS[name]
    content = st.composite(damaged)(text)
    refused = refusal(read, data.draw(content))
    assert refused is None or (refused and "\n" not in refused)
