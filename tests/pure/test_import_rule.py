"""Imports point one way, and what needs no torch does not load it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import pipeloom

ROOT = Path(pipeloom.__file__).parent

# What each room may import of pipeloom, beside itself, `common`, `errors` and `version`.
DATA = {"ir"}
PROCESSES = {"ir"}
TRANSPORT = {"ir", "split", "processes"}
AUTOGRAD = {"ir", "split", "slicing", "transport"}
ENGINE = {"ir", "passes", "split", "slicing", "processes", "transport", "autograd"}
PARALLEL = ENGINE | {"engine"}
TRAINING = PARALLEL | {"parallel"}
PLAN = {"ir", "schedules", "passes", "sim", "parallel", "split", "models", "slicing"}  # models: measuring runs one
TRAIN = TRAINING | PLAN | {"training", "plan", "report"}
ALLOWED = {
    "common": set(),
    "ir": set(),
    "schedules": DATA,
    "passes": DATA,
    "sim": DATA,
    "slicing": set(),
    "split": {"ir", "slicing"},
    "models": {"slicing"},
    "processes": PROCESSES,
    "transport": TRANSPORT,
    "autograd": AUTOGRAD,
    "engine": ENGINE,
    "parallel": PARALLEL,
    "training": TRAINING,
    "plan": PLAN,
    "report": {"ir", "sim"},
    "train": TRAIN,
    "cli": TRAIN | {"train"},
}
TORCH_FREE = ("ir", "schedules", "passes", "sim", "report")


def imports_of(path: Path) -> set[str]:
    """The full names of all modules that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} line {node.lineno}: imports are absolute"
            found.add(node.module)
            if node.module == "pipeloom":
                found.update(f"pipeloom.{alias.name}" for alias in node.names)
    return found


def files_of(room: str) -> list[Path]:
    files = sorted((ROOT / room).rglob("*.py"))
    assert files, room
    return files


@pytest.mark.parametrize("room", ALLOWED)
def test_imports_point_one_way(room):
    for path in files_of(room):
        for name in imports_of(path):
            if name.startswith("pipeloom."):
                target = name.split(".")[1]
                if not (ROOT / target).is_dir():  # a name of the package itself, or errors and version
                    continue
                assert target in {room, "common"} | ALLOWED[room], f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("room", TORCH_FREE)
def test_rooms_without_torch_name_it_nowhere(room):
    for path in files_of(room):
        loaded = {name.split(".")[0] for name in imports_of(path)}
        assert not loaded & {"torch", "safetensors", "transformers"}, path


@pytest.mark.parametrize("room", ["ir", "schedules", "passes"])
def test_the_core_needs_the_standard_library_alone_and_numpy_where_there_is_much(room):
    for path in files_of(room):
        loaded = {name.split(".")[0] for name in imports_of(path)} - {"pipeloom"}
        many = path.parent.name in ("large", "search")
        allowed = {"numpy", "ortools", "scipy"} if many else set()
        assert loaded <= set(sys.stdlib_module_names) | allowed, path


def modules_after(code: str, directory: Path) -> set[str]:
    """The modules that a fresh interpreter has loaded after `code`."""
    script = f"{code}\nimport sys\nprint('LOADED', *sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=directory, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rpartition("LOADED ")[2].split())


SIMULATE = (
    "from pipeloom.cli import main\n"
    "code = main(['simulate', '1f1b', '--ranks', '2', '--microbatches', '4', {}])\n"
    "assert code == 0, code"
)

SLICE = """
from pathlib import Path
from pipeloom.cli import main
Path("costs.json").write_text('{"forward": {"base": [[8, 1], [64, 2]]}, "backward": {"base": [[8, 1], [64, 2]]}}')
assert main(["slice", "--sequence", "64", "--ranks", "4", "--batch", "2", "--costs", "costs.json"]) == 0
"""


PARTITION = """
from pathlib import Path
from pipeloom.cli import main
layer = '"name": "a", "forward_seconds": 1, "backward_seconds": 2, "activation_bytes": 3, "parameter_bytes": 4'
Path("profile.json").write_text('{"layers": [{' + layer + '}]}')
words = ["partition", "--profile", "profile.json", "--ranks", "2", "--bandwidth", "1"]
assert main(words) == main([*words, "--schedule", "dapple", "--microbatches", "2"]) == 0
"""


@pytest.mark.parametrize(
    "code",
    [
        "import pipeloom; pipeloom.check(pipeloom.schedules.gpipe(num_ranks=2, num_microbatches=2))",
        "import pipeloom; pipeloom.simulate, pipeloom.Costs, pipeloom.Network, pipeloom.Timeline",
        "import pipeloom.report",
        SIMULATE.format("'--json'"),
        SIMULATE.format("'--html', 'a.html', '--svg', 'a.svg', '--trace', 'a.json.gz'"),
        SLICE,
        PARTITION,
        "from pipeloom.cli import main; assert main(['schedules', '--json']) == 0",
        "from pipeloom.cli import main; assert main(['schedules']) == 0",
        "from pipeloom.cli import main; assert main(['memory', '--memory.cap', '1TB']) == 0",
        "from pipeloom.cli import main; assert main(['--help']) == 0",
    ],
)
def test_simulating_loads_no_torch(code, tmp_path):
    assert "torch" not in modules_after(code, tmp_path)


def test_numbers_alone_load_neither_templates_nor_terminal_pictures(tmp_path):
    loaded = modules_after(SIMULATE.format("'--json'"), tmp_path)
    assert not loaded & {"torch", "numpy", "scipy", "jinja2", "rich.table", "pipeloom.report"}


def test_nothing_is_pickled_in_files_or_between_processes():
    for path in ROOT.rglob("*.py"):
        assert not {name.split(".")[0] for name in imports_of(path)} & {"pickle", "marshal", "shelve", "dill"}, path
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                assert not node.attr.endswith(("_object", "_object_list")), f"{path} line {node.lineno}: it pickles"
                owner = node.value.id if isinstance(node.value, ast.Name) else ""
                assert (owner, node.attr) not in {("torch", "load"), ("torch", "save"), ("np", "load")}, path
