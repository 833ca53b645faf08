"""Every reader of JSON refuses a file that is nested without end in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import pipeloom
from pipeloom.common.tensor_file import stored_tensors
from pipeloom.data.shards import read_lines
from pipeloom.errors import InputError
from pipeloom.pretrained.files import find_tensors
from pipeloom.report.run_files import read_environment, read_metrics, read_timelines
from pipeloom.train.checkpoint.manifest import read_weight_map
from pipeloom.train.config.model_directory import model_facts
from tests.pure.test_json_text import FILES


def read_index(path: Path) -> object:
    return find_tensors(path.parent)


def read_header(path: Path) -> object:
    path.write_bytes(path.stat().st_size.to_bytes(8, "little") + path.read_bytes())
    return stored_tensors(path)


def read_facts(path: Path) -> object:
    (path.parent / "config.json").write_bytes(path.read_bytes())
    return model_facts(str(path.parent))


@pytest.mark.parametrize(
    "read",
    [
        *(lambda path, read=read: read(path.read_text()) for read, _ in FILES.values()),
        read_metrics,
        read_timelines,
        read_environment,
        read_index,
        read_facts,
        read_header,
        lambda path: read_weight_map(path.parent, None),
        lambda path: list(read_lines(path)),
    ],
)
@pytest.mark.parametrize("deep", ["[" * 100_000, '{"":' * 100_000])
def test_nesting_without_end_is_one_line(tmp_path: Path, read: Callable[[Path], object], deep: str) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(deep)
    with pytest.raises(InputError) as error:
        read(path)
    assert "\n" not in str(error.value)


def test_files_are_read_by_the_reader_that_notices_nesting() -> None:
    """`json.loads` itself reads only what processes of this program tell each other."""
    root = Path(pipeloom.__file__).parent
    found = {str(path.relative_to(root)) for path in root.rglob("*.py") if "json.load" in path.read_text()}
    between_processes = {
        *("processes/agreement.py", "processes/hang_board.py", "processes/hang_report.py", "train/process_group.py"),
        *("transport/values.py", "transport/shared_memory.py", "train/config/train_config.py"),
        *("train/machine/__main__.py", "train/machine/collective_times.py", "train/machine/measure.py"),
        *("plan/plan.py", "train/output/directory.py", "integrations/ray/workers.py"),
        *("data/worker.py", "data/tokenizing.py", "processes/recovery/lifeline.py", "train/recovery/state_copies.py"),
        *("train/recovery/step_agreement.py", "processes/launching/fork_server.py", "train/elastic/entry.py"),
        *("split/planned/tracking/forms.py", "training/fastest_plan.py"),
    }
    assert found - {"common/json_reader.py"} == between_processes
