"""Imports point one way, and what needs no torch does not load it."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import pipeloom

ROOT = Path(pipeloom.__file__).parent
MODULES = {  # dotted name -> file
    ".".join(("pipeloom", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}

# What each room may import of pipeloom, beside itself, `common`, `errors` and `version`.
DATA = {"ir"}
PROCESSES = {"ir"}
TRANSPORT = {"ir", "split", "processes", "devices"}
AUTOGRAD = {"ir", "split", "slicing", "transport"}
ENGINE = {"ir", "passes", "split", "slicing", "processes", "devices", "transport", "autograd"}
PARALLEL = ENGINE | {"engine", "models"}  # models: experts that processes share
PRETRAINED = PARALLEL | {"parallel"}
TRAINING = PRETRAINED | {"pretrained", "plan"}
# Models and autograd: measuring runs them.
PLAN = {"ir", "schedules", "passes", "sim", "parallel", "split", "models", "slicing", "autograd"}
TRAIN = TRAINING | PLAN | {"training", "plan", "report", "data"}
CHAOS = {"processes", "train"}
CLI = TRAIN | {"train", "pipe", "chaos", "job_files", "watch"}
INTEGRATIONS = TRAINING | {"training", "schedules", "train"}
ALLOWED = {
    "common": set(),
    "ir": set(),
    "data": set(),
    "schedules": DATA,
    "passes": DATA,
    "sim": DATA,
    "slicing": set(),
    "split": {"ir", "slicing"},
    "models": {"slicing", "autograd"},
    "processes": PROCESSES,
    "devices": set(),
    "transport": TRANSPORT,
    "autograd": AUTOGRAD,
    "engine": ENGINE,
    "parallel": PARALLEL,
    "pretrained": PRETRAINED,
    "pipe": {"split", "autograd", "devices"},
    "training": TRAINING,
    "plan": PLAN,
    "report": {"ir", "sim"},
    "watch": {"sim", "report", "processes"},
    "train": TRAIN,
    "chaos": CHAOS,
    "job_files": set(),
    "cli": CLI,
    "integrations": INTEGRATIONS,
}
TORCH_FREE = ("ir", "schedules", "passes", "sim", "report", "watch")


# Files that import each other in a circle until they are mended, and folders that may have more than 15 files.
KNOWN_CIRCLES: set[frozenset[str]] = set()
LARGE_FOLDERS = {"schedules", "cli"}  # one file per family, and per command
MOST_FILES = 15


@cache
def imports_of(path: Path) -> frozenset[str]:
    """The full names of all modules that a file imports: anywhere in it, by name as well, and in lazy tables."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} line {node.lineno}: imports are absolute"
            modules = {f"{node.module}.{alias.name}" for alias in node.names} & MODULES.keys()
            found |= modules if len(modules) == len(node.names) else {*modules, node.module}
        elif isinstance(node, ast.Call) and called(node) in ("import_module", "__import__"):
            found |= module_names(node.args[0], path)
        elif isinstance(node, ast.Call) and called(node) == "lazy_exports":
            found |= lazy_homes(path)
    return frozenset(found)


def called(call: ast.Call) -> str:
    """The last part of the name of what is called."""
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def module_names(argument: ast.expr, path: Path) -> set[str]:
    """What `import_module` may import: a literal, or all modules that an f-string may name."""
    if isinstance(argument, ast.Constant):
        return {argument.value}
    if isinstance(argument, ast.JoinedStr) and isinstance(argument.values[0], ast.Constant):
        start = argument.values[0].value
        return {name for name in MODULES if name.startswith(start) and "." not in name.removeprefix(start)}
    assert path == ROOT / "common" / "lazy_exports.py", f"{path}: import_module of a name that no test can see"
    return set()


def lazy_homes(path: Path) -> set[str]:
    """The modules of a file's table of lazy exports; the package itself stands for its submodules."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    tables = [node.value for node in body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_LAZY"]
    assert len(tables) == 1, f"{path}: lazy_exports without a table of literals"
    package = next(name for name, file in MODULES.items() if file == path)
    table = ast.literal_eval(tables[0])
    homes = {*table, *(f"{package}.{name}" for name in table.get(package, "").split())} - {package}
    assert homes <= MODULES.keys(), f"{path}: {homes - MODULES.keys()} are no modules"
    return homes


def files_of(room: str) -> list[Path]:
    files = sorted((ROOT / room).rglob("*.py"))
    assert files, room
    return files


@pytest.mark.parametrize("room", ALLOWED)
def test_imports_point_one_way(room):
    upward = {
        (str(path.relative_to(ROOT)), target)
        for path in files_of(room)
        for name in imports_of(path)
        if name.startswith("pipeloom.") and (ROOT / (target := name.split(".")[1])).is_dir()
        if target not in {room, "common"} | ALLOWED[room]
    }
    assert not upward


def edges() -> dict[Path, set[Path]]:
    """For each file, the files that it imports. What a package's `__init__` takes from below it is a mere re-export."""
    return {
        path: {
            target
            for name in imports_of(path)
            if (target := MODULES.get(name)) is not None
            and target != path
            and not (path.name == "__init__.py" and target.is_relative_to(path.parent))
        }
        for path in MODULES.values()
    }


def circles(graph: dict[Path, set[Path]]) -> set[frozenset[str]]:
    """Sets of files each of which imports, by way of others, all of the set."""

    def reached(path: Path) -> set[Path]:
        seen: set[Path] = set()
        coming = [path]
        while coming:
            for target in graph[coming.pop()] - seen:
                seen.add(target)
                coming.append(target)
        return seen

    reaches = {path: reached(path) for path in graph}
    return {
        frozenset(str(other.relative_to(ROOT)) for other in reaches[path] if path in reaches[other])
        for path in graph
        if path in reaches[path]
    }


def test_no_files_import_each_other_in_a_circle():
    found = circles(edges())
    assert not found - KNOWN_CIRCLES, [sorted(circle) for circle in found - KNOWN_CIRCLES]
    assert not KNOWN_CIRCLES - found, "these circles are broken: take them out of KNOWN_CIRCLES"


def test_circles_are_seen_wherever_the_import_stands(tmp_path):
    text = "def f():\n    from pipeloom.{} import x\nif TYPE_CHECKING:\n    import pipeloom.{}\n"
    for name, others in {"a": ("ir.walk", "sim.costs"), "b": ("plan", "errors")}.items():
        (tmp_path / name).write_text(text.format(*others))
        assert imports_of(tmp_path / name) == {f"pipeloom.{other}" for other in others}
    (tmp_path / "c").write_text("import_module('pipeloom.ir.walk'); importlib.import_module(f'pipeloom.sim.{name}')")
    assert {"pipeloom.ir.walk", "pipeloom.sim.costs"} <= imports_of(tmp_path / "c")
    one, two, three = (ROOT / name for name in ("one", "two", "three"))
    assert circles({one: {two}, two: {three}, three: set()}) == set()
    assert circles({one: {two}, two: {one}, three: {one}}) == {frozenset({"one", "two"})}


def test_folders_are_small():
    counts = {str(folder.relative_to(ROOT)): len([*folder.glob("*.py")]) for folder in (*ROOT.rglob("*"), ROOT)}
    large = {folder for folder, count in counts.items() if count > MOST_FILES}
    assert large == LARGE_FOLDERS, {folder: counts[folder] for folder in large ^ LARGE_FOLDERS}


def test_no_file_imports_names_from_the_package_it_lives_in():
    for name, path in MODULES.items():
        above = {name.rsplit(".", depth)[0] for depth in range(1, name.count("."))} - {name}
        entry_point = path.name == "__main__.py"
        assert entry_point or not above & imports_of(path), f"{path}: import from the file that defines it"


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


WITHOUT_TORCH = (
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
)


def test_simulating_loads_no_torch(tmp_path):
    """One after another in one interpreter, which fails at the first that loads it."""
    check = "import sys; assert 'torch' not in sys.modules, {!r}"
    code = "\n".join(f"{each}\n{check.format(each)}" for each in WITHOUT_TORCH)
    assert "torch" not in modules_after(code, tmp_path)


def test_numbers_alone_load_neither_templates_nor_terminal_pictures(tmp_path):
    loaded = modules_after(SIMULATE.format("'--json'"), tmp_path)
    assert not loaded & {"torch", "numpy", "scipy", "jinja2", "rich.table", "pipeloom.report"}


def test_nothing_is_pickled_in_files_or_between_processes():
    for path in ROOT.rglob("*.py"):
        assert not {name.split(".")[0] for name in imports_of(path)} & {"pickle", "marshal", "shelve", "dill"}, path
        text = path.read_text(encoding="utf-8")
        if not any(word in text for word in ("_object", "load", "save")):
            continue  # parsing all files takes seconds
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute) and node.attr != "parse_object":  # jsonargparse's, of plain values
                assert not node.attr.endswith(("_object", "_object_list")), f"{path} line {node.lineno}: it pickles"
                owner = node.value.id if isinstance(node.value, ast.Name) else ""
                assert (owner, node.attr) not in {("torch", "load"), ("torch", "save"), ("np", "load")}, path
