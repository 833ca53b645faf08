"""The sdist and the wheel: the files and metadata that they hold, and pipeloom installed from the wheel alone."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator
from email import message_from_bytes
from functools import cache
from pathlib import Path
from typing import NamedTuple
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

from pipeloom.version import __version__

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSIONS = [(3, 11), (3, 12), (3, 13), (3, 14)]
OTHER_VERSIONS = [f"{major}.{minor}" for major, minor in VERSIONS if (major, minor) != sys.version_info[:2]]
NAME = f"pipeloom-{__version__}"

# What commands without torch and numpy depend on: pure Python, which every version of Python reads.
PURE_PYTHON = ("jinja2", "jsonargparse", "markdown_it", "markupsafe", "mdurl", "pygments", "rich", "yaml")

# These packages import with the standard library alone, and all their modules with at most numpy beside it.
IMPORT_ALL = """
import importlib, pkgutil
for name in ("ir", "schedules", "passes", "sim"):
    package = importlib.import_module(f"pipeloom.{name}")
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if error.name != "numpy":
                raise
"""


class Built(NamedTuple):
    sdist: Path
    wheel: Path  # built from the sdist
    wheel_of_checkout: Path


def _run(words: list[str | Path], folder: Path, **variables: str) -> str:
    """What a command prints, without the checkout on its path."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    environment = {**inherited, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **variables}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@cache
def _checkout() -> tuple[Path, ...]:
    """The files of the checkout that git does not ignore, relative to it."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return tuple(path for name in listed.stdout.split("\0")[:-1] if (ROOT / (path := Path(name))).is_file())


def _package() -> set[str]:
    return {str(path.relative_to("src")) for path in _checkout() if path.is_relative_to("src/pipeloom")}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Built as `make dist` builds them, from a copy of the checkout without ignored files."""
    copy, both, direct = (tmp_path_factory.mktemp(name) for name in ("checkout", "both", "direct"))
    for path in _checkout():
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, copy / path)
    build: list[str | Path] = [sys.executable, "-m", "build", "--no-isolation", "--skip-dependency-check", "--outdir"]
    _run([*build, both], copy)
    _run([*build, direct, "--wheel"], copy)
    (sdist,) = both.glob("*.tar.gz")
    (wheel,) = both.glob("*.whl")
    (wheel_of_checkout,) = direct.glob("*.whl")
    return Built(sdist, wheel, wheel_of_checkout)


@pytest.fixture(scope="module")
def environment(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of a new virtual environment with the wheel; dependencies are those of this interpreter."""
    folder = tmp_path_factory.mktemp("environment")
    site = _install(Path(sys.executable), built.wheel, folder)
    found = [path for path in sys.path if path.endswith("-packages")]
    (site / "dependencies.pth").write_text("\n".join(found))  # .pth files in these folders are not read
    return folder / "bin"


def _install(interpreter: Path, wheel: Path, folder: Path) -> Path:
    """A new virtual environment with the wheel, and nothing else; returns its site-packages."""
    _run([interpreter, "-m", "venv", "--without-pip", folder], folder)
    pip = [interpreter, "-m", "pip", "--python", folder / "bin" / "python", "install", "--quiet"]
    _run([*pip, "--no-index", "--no-deps", "--no-compile", wheel], folder)
    (site,) = folder.glob("lib/python3*/site-packages")
    return site


def _files_of_wheel(wheel: Path) -> set[str]:
    with ZipFile(wheel) as opened:
        return {name for name in opened.namelist() if not name.endswith("/")}


def test_the_wheel_holds_the_files_of_the_package(built: Built) -> None:
    about = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt"}
    assert built.wheel.name == f"{NAME}-py3-none-any.whl"
    assert {"pipeloom/py.typed", "pipeloom/report/run.html.j2"} < _package()
    assert _files_of_wheel(built.wheel) == _package() | {f"{NAME}.dist-info/{name}" for name in about}


def test_wheels_of_sdist_and_checkout_are_equal(built: Built) -> None:
    with ZipFile(built.wheel) as one, ZipFile(built.wheel_of_checkout) as other:
        assert {name: one.read(name) for name in one.namelist()} == {
            name: other.read(name) for name in other.namelist()
        }


def test_the_sdist_holds_the_files_of_the_package(built: Built) -> None:
    with tarfile.open(built.sdist) as opened:
        held = {member.name.removeprefix(f"{NAME}/") for member in opened if member.isfile()}
    generated = {name for name in held if name.startswith("src/pipeloom.egg-info/")} | {"PKG-INFO", "setup.cfg"}
    package = {f"src/{name}" for name in _package()}
    assert held - generated == package | {"LICENSE", "README.md", "pyproject.toml"}


def test_the_metadata_is_that_of_pyproject(built: Built) -> None:
    with ZipFile(built.wheel) as opened:
        metadata = message_from_bytes(opened.read(f"{NAME}.dist-info/METADATA"))
        assert opened.read(f"{NAME}.dist-info/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert (metadata["Name"], metadata["Version"]) == ("pipeloom", __version__)
    assert metadata["Requires-Python"] == PROJECT["requires-python"] == f">=3.{VERSIONS[0][1]}"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload(decode=True) == (ROOT / "README.md").read_bytes()
    assert metadata["Keywords"] == ",".join(PROJECT["keywords"])
    assert metadata.get_all("Classifier") == PROJECT["classifiers"]
    minor = "Programming Language :: Python :: 3."
    assert [text for text in PROJECT["classifiers"] if text.startswith(minor)] == [f"{minor}{m}" for _, m in VERSIONS]
    extras = PROJECT["optional-dependencies"]
    assert metadata.get_all("Provides-Extra") == list(extras)
    expected = [Requirement(text) for text in PROJECT["dependencies"]]
    expected += [Requirement(f'{text}; extra == "{extra}"') for extra, texts in extras.items() for text in texts]
    assert [Requirement(text) for text in metadata.get_all("Requires-Dist")] == expected


def test_an_installed_wheel_trains_and_reports(environment: Path, tmp_path: Path) -> None:
    where = "import pipeloom, importlib.metadata as m; print(pipeloom.__file__, m.version('pipeloom'))"
    installed, version = _run([environment / "python", "-c", where], tmp_path).split()
    assert Path(installed).is_relative_to(environment.parent)
    assert _run([environment / "pipeloom", "--version"], tmp_path) == f"pipeloom {version}\n"
    job = ["launch", "torchrun", "--nodes", "2", "--processes_per_node", "1", "--", "own.py"]
    assert "own.py" in _run([environment / "pipeloom", *job], tmp_path)
    (tmp_path / "text.txt").write_text("the loom weaves micro-batches through the ranks\n" * 60)
    small = "--model.layers 2 --model.width 16 --model.heads 2 --model.sequence_length 16 --batch.size 8"
    short = "--steps 2 --eval_steps 0 --save_steps 0 --sample_tokens 0 --data.path text.txt --output_dir run"
    printed = _run([environment / "pipeloom", "train", *small.split(), *short.split()], tmp_path, OMP_NUM_THREADS="1")
    assert "step 2/2  loss " in printed
    report = tmp_path / "run" / "report.html"
    report.unlink()
    _run([environment / "pipeloom", "report", "run"], tmp_path)
    assert report.read_text().lower().startswith("<!doctype html>")


@cache
def _folders_of_interpreters() -> tuple[Path, ...]:
    """PATH, then the interpreters that pyenv has installed."""
    folders = [Path(folder) for folder in os.get_exec_path()]
    if pyenv := shutil.which("pyenv"):
        root = subprocess.run([pyenv, "root"], capture_output=True, text=True, check=False).stdout.strip()
        folders += sorted(Path(root).glob("versions/*/bin"))
    return tuple(folders)


def _interpreters(version: str) -> Iterator[Path]:
    """Those that run, and have venv and pip: pyenv's shims may not, and distributions may leave these out."""
    asked = "import sys, venv, pip; print('%d.%d' % sys.version_info[:2])"
    for folder in _folders_of_interpreters():
        path = folder / f"python{version}"
        if path.is_file():
            done = subprocess.run([path, "-I", "-c", asked], capture_output=True, text=True, check=False)
            if done.returncode == 0 and done.stdout.strip() == version:
                yield path


@pytest.mark.parametrize(
    "version", ["newest", *(pytest.param(version, marks=pytest.mark.whole_grid) for version in OTHER_VERSIONS)]
)
def test_other_versions_of_python_run_what_needs_no_torch(version: str, built: Built, tmp_path: Path) -> None:
    """Without dependencies; then with those of the commands, which are pure Python. Whole grids have every version."""
    tried = OTHER_VERSIONS[::-1] if version == "newest" else [version]
    interpreter = next((found for each in tried for found in _interpreters(each)), None)
    if interpreter is None:
        pytest.skip(f"no Python {' or '.join(tried)} with venv and pip on PATH or in pyenv")
    folder = tmp_path / "environment"
    folder.mkdir()
    site = _install(interpreter, built.wheel, folder)
    python, pipeloom = folder / "bin" / "python", folder / "bin" / "pipeloom"
    _run([python, "-W", "error", "-m", "compileall", "-q", site / "pipeloom"], tmp_path)
    _run([python, "-W", "error", "-c", IMPORT_ALL], tmp_path)
    assert _run([pipeloom, "--version"], tmp_path) == f"pipeloom {__version__}\n"
    for name in PURE_PYTHON:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.submodule_search_locations is not None
        (site / name).symlink_to(spec.submodule_search_locations[0])
    page = tmp_path / "page.html"
    simulated: list[str | Path] = ["simulate", "1f1b", "--ranks", "2", "--microbatches", "2", "--html", page]
    # Bytecode is not written next to the packages of this interpreter.
    assert "bubble" in _run([pipeloom, *simulated], tmp_path, PYTHONDONTWRITEBYTECODE="1")
    assert page.read_text().lower().startswith("<!doctype html>")
