"""The documentation says what is so: pictures and tables are drawn anew, links lead somewhere, commands parse."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import shlex
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from benchmarks import tables
from benchmarks.common.report import FORMAT, markdown, parts_from_json, parts_to_json, table
from benchmarks.common.statistics import spread
from benchmarks.reliability.report import parts as reliability_parts

import pipeloom
from pipeloom import cli
from pipeloom.cli.common.parser import Parser

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "benchmarks").rglob("README.md")),
]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def draw() -> ModuleType:
    return _script("draw")


def test_pictures_are_what_is_drawn_now(draw, tmp_path):
    drawn = {path.name: path.read_text() for path in draw.draw(tmp_path)}
    committed = {path.name: path.read_text() for path in (ROOT / "docs" / "pictures").glob("*.svg")}
    assert committed.keys() == drawn.keys()
    stale = [name for name in drawn if drawn[name] != committed[name]]
    assert not stale, f"run python docs/draw.py: {stale}"


def test_the_page_of_hugging_face_families_is_what_was_measured():
    families = _script("huggingface_families")
    data = json.loads(families.DATA.read_text())
    assert families.PAGE.read_text() == families.page(data), "run python docs/huggingface_families.py"
    assert sum(row["pp"] <= families.BOUND for row in data["families"] if isinstance(row["pp"], float)) >= 110


def test_tables_are_what_is_generated_now(draw):
    for page in draw.TABLES_IN:
        text = page.read_text()
        assert "<!-- table: " in text
        assert draw.fill_tables(text) == text, f"run python docs/draw.py: {page.name}"


# --- results of benchmarks ------------------------------------------------------------------------------------------


def test_results_on_the_pages_are_those_of_the_json_files():
    assert tables.PAGE.read_text() == tables.page(), "run python -m benchmarks.tables"
    readme = tables.README.read_text()
    assert "<!-- results: headlines -->\n|" in readme
    assert readme == tables.fill(readme), "run python -m benchmarks.tables"
    experts = tables.EXPERTS.read_text()
    assert "<!-- results: mixtures -->\nMean" in experts
    assert experts == tables.fill(experts), "run python -m benchmarks.tables"
    reliability = tables.RELIABILITY.read_text()
    assert "<!-- results: reliability -->\n###" in reliability
    assert reliability == tables.fill(reliability), "run python -m benchmarks.tables"


def test_every_benchmark_has_a_section_with_its_command():
    page = tables.PAGE.read_text()
    for name in tables.benchmarks():
        assert f"[benchmarks/{name}](../benchmarks/{name}/README.md)" in page
        current = any(map(tables.is_current, tables.results_of(name)))
        assert current or f"{tables.NOT_MEASURED}: run `python -m benchmarks.{name}`." in page


def test_results_of_another_version_are_marked():
    result = {"source": "measured", "version": pipeloom.__version__}
    assert tables.is_current(result)
    assert not tables.is_current({**result, "version": "0.0.1"})
    assert not tables.is_current({**result, "source": "transcribed"})
    for headline in tables.HEADLINES:
        assert headline.benchmark in tables.benchmarks()


def test_result_files_have_everything_that_a_reader_needs():
    for name in tables.benchmarks():
        for result in tables.results_of(name):
            assert result["format"] == FORMAT
            assert result["benchmark"] == name
            assert {"date", "processor", "cores", "python"} <= result["environment"].keys()
            assert result["command"].startswith(f"python -m benchmarks.{name}")
            for value in result["headlines"].values():
                assert value["first_quartile"] <= value["median"] <= value["third_quartile"]


def test_parts_of_a_result_survive_json():
    parts = ["a paragraph", table(("system", "ms"), [("pipeloom", spread([1.0, 2.0, 4.0]).show()), ("torch", 3)])]
    stored = json.loads(json.dumps(parts_to_json(parts)))
    assert stored[1]["rows"][0][1] == {
        "text": "2.00 (1.50-3.00)",
        "median": 2.0,
        "first_quartile": 1.5,
        "third_quartile": 3.0,
    }
    assert markdown(parts_from_json(stored)) == markdown(parts)


def test_runs_of_a_fault_become_one_row_per_system():
    run = {
        "system": "pipeloom", "kind": "flip", "told_by": "pipeloom", "told_seconds": 1.0, "named_seconds": 1.0,
        "ended_seconds": None, "given_up": False, "again_seconds": 4.0, "steps_again": 9, "resumed": "itself",
        "difference": "", "left": [],
    }  # fmt: skip
    quiet = {**run, "system": "torchrun, pipeloom", "told_by": "", "told_seconds": None, "named_seconds": None}
    changed = {**quiet, "difference": "losses from step 9", "again_seconds": 5.0, "left": ["process 12"]}
    heading, found = reliability_parts([run, quiet, changed])
    assert heading == "### A bit of the newest checkpoint is flipped"
    cells = "pipeloom,1,pipeloom,1.0 s,1.0 s,-,by itself,4.0 s,9,bitwise,nothing"
    assert found.rows[0] == tuple(cells.split(","))
    assert found.rows[1] == ("torchrun, pipeloom", "2", "none", "-", "-", "not in 5 s", "by itself", "4.0-5.0 s", "9",
                             "bitwise (1), silently different (1)", "nothing (1), 1 process (1)")  # fmt: skip


# --- the API reference ----------------------------------------------------------------------------------------------


def test_pages_of_the_api_are_what_is_generated_now():
    api = _script("api")
    committed = {path.name: path.read_text() for path in api.PAGES.glob("*.md")}
    texts = api.pages()
    stale = sorted(name for name in committed.keys() | texts.keys() if committed.get(name) != texts.get(name))
    assert not stale, f"run python docs/api.py: {stale}"
    for package in api.public_packages():
        assert package in api.TITLES, f"docs/api.py: {package} needs an entry in TITLES"


def test_every_public_name_has_its_place_in_the_api():
    api = _script("api")
    pages = {path.name: path.read_text() for path in api.PAGES.glob("*.md")}
    navigation = (ROOT / "mkdocs.yml").read_text()
    for package in api.public_packages():
        assert f"reference/api/{package}.md" in navigation, f"mkdocs.yml: {package} is missing in nav"
        module = importlib.import_module(package)
        names = getattr(module, "__all__", None) or api.public_names(package)
        for name in names:
            entry = f"`pl.{name}`" if package == "pipeloom" else f"::: {package}.{name}\n"
            assert entry in pages[f"{package}.md"] + "\n", (package, name)


# --- links ----------------------------------------------------------------------------------------------------------


def _without_code(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = _without_code(page.read_text())
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    entries = set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))  # as mkdocstrings makes them
    return entries | {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", NAMES)
def test_relative_links_lead_somewhere(name):
    page = ROOT / name
    for target in re.findall(r"\]\(([^)\s]+)\)", _without_code(page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = urllib.parse.unquote(target).partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{name}: {target}"
        assert not anchor or anchor in _anchors(found), f"{name}: {target}"


def test_every_page_and_picture_is_reachable():
    text = "\n".join(page.read_text() for page in PAGES)
    for path in (*(ROOT / "docs").rglob("*.md"), *(ROOT / "docs" / "pictures").glob("*.svg")):
        assert path.name in text, path


def _names_of_files(name: str) -> set[str]:
    """The files and folders in a page's text, such as `engine/worker.py` or `docs/draw.py`."""
    text = _without_code((ROOT / name).read_text())
    return set(re.findall(r"`((?:[\w.-]+/)+(?:[\w-]+\.(?:py|md|yml|json))?)`", text))


@pytest.mark.parametrize("name", ["docs/explanation/architecture.md", "docs/explanation/runtime.md", "CONTRIBUTING.md"])
def test_code_blocks_are_closed(name):
    """Inside a block no fence opens another one, so that no text becomes code and no code becomes text."""
    is_open = False
    for number, line in enumerate((ROOT / name).read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            word = line.strip().strip("`")
            assert not (is_open and word), f"{name}:{number} opens a block inside a block"
            is_open = not is_open
    assert not is_open, f"{name} does not close its last block"


@pytest.mark.parametrize("name", ["docs/explanation/architecture.md", "docs/explanation/runtime.md", "CONTRIBUTING.md"])
def test_files_that_a_page_names_exist(name):
    package = ROOT / "src" / "pipeloom"
    roots = [ROOT, package, *(path for path in package.iterdir() if path.is_dir())]
    names = _names_of_files(name)
    assert names
    missing = sorted(file for file in names if not any((root / file).exists() for root in roots))
    assert not missing, f"{name} names files that do not exist: {missing}"


def test_the_architecture_lists_every_package():
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
    rooms = {path.parent.name for path in (ROOT / "src" / "pipeloom").glob("*/__init__.py")}
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == rooms - {"common"}


# --- commands -------------------------------------------------------------------------------------------------------


class _ParsedError(Exception):
    """A command line was parsed; nothing shall run."""


def _commands(text: str) -> Iterator[str]:
    """The lines after ``$`` in blocks of console."""
    for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ "):
                yield line[2:]


def _pipeloom_words(command: str) -> list[str] | None:
    """What the command gives to pipeloom; None if it is another program."""
    words = [word.split("/")[-1] if word.endswith("/pipeloom") else word for word in shlex.split(command)]
    if words[0] == "pipeloom":
        return words[1:]
    for index in range(len(words) - 1):
        if words[index : index + 2] == ["-m", "pipeloom"]:
            return words[index + 2 :]
    return None


def _refusal(words: list[str], monkeypatch, capsys) -> str | None:
    """What pipeloom's own parser says against a command line."""
    original = Parser.parse_args

    def parse_only(self, *args, **kwargs):
        original(self, *args, **kwargs)
        raise _ParsedError

    with monkeypatch.context() as patched:
        patched.setattr(Parser, "parse_args", parse_only)
        try:
            code = cli.main(words)
        except _ParsedError:
            return None
    said = capsys.readouterr()
    return None if code == 0 else said.err


@pytest.mark.parametrize("name", NAMES)
def test_commands_parse(name, monkeypatch, capsys, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text("steps: 1\n")
    for command in _commands((ROOT / name).read_text()):
        words = _pipeloom_words(command)
        if words is not None:
            words = [str(config) if word.endswith(".yaml") else word for word in words]
            assert _refusal(words, monkeypatch, capsys) is None, f"{name}: {command}"


def test_the_reference_lists_every_command():
    reference = (ROOT / "docs/reference/cli.md").read_text()
    rows = [f"| [`{name}`](#{name}) | {text} |" for name, text in cli.COMMANDS.items()]
    assert re.findall(r"^\| \[`\w+`\]\(#.*$", reference, re.MULTILINE) == rows


def test_the_check_of_commands_would_notice(monkeypatch, capsys):
    assert "did you mean --steps?" in _refusal(["train", "--stpes", "1"], monkeypatch, capsys)
    assert "unknown" in _refusal(["trian"], monkeypatch, capsys)
    assert _refusal(["simulate", "1f1b"], monkeypatch, capsys)


@pytest.mark.parametrize("name", NAMES)
def test_other_commands_name_files_that_exist(name):
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in _commands((ROOT / name).read_text()):
        words = shlex.split(command)
        if words[0] == "make":
            assert words[1] in targets, command
        for word in words:
            if word.startswith(("examples/", "docs/", "benchmarks.")):
                file = word.replace(".", "/") if word.startswith("benchmarks.") else word.partition(":")[0]
                path = ROOT / file  # without the function of `file.py:function`
                assert path.exists() or path.with_suffix(".py").exists(), command


def test_the_reference_has_every_option(monkeypatch, capsys):
    reference = (ROOT / "docs" / "reference" / "cli.md").read_text()
    seen: list[Parser] = []

    def remember(self, *args, **kwargs):
        seen.append(self)
        raise _ParsedError

    lines = [
        "simulate",
        "slice",
        "partition",
        "tune",
        "schedules",
        "report",
        "doctor",
        "collectives",
        "chaos job.yaml",
        "launch",
        "checkpoint ls",
        "checkpoint verify",
        "checkpoint convert",
    ]
    for line in lines:
        with monkeypatch.context() as patched:
            patched.setattr(Parser, "parse_args", remember)
            with pytest.raises(_ParsedError):
                cli.main(line.split())
    assert len(seen) == len(lines)
    for parser in seen:
        for option in (o for action in parser._actions for o in action.option_strings if o.startswith("--")):
            assert option == "--help" or f"`{option}" in reference or f"{option}`" in reference, (parser.prog, option)
    for command in cli.COMMANDS:
        assert f"## {command}\n" in reference


def test_json_keys_of_simulate_are_in_the_reference(capsys):
    reference = (ROOT / "docs" / "reference" / "cli.md").read_text()
    line = "pipeloom simulate 1f1b --ranks 4 --microbatches 8 --json"
    assert cli.main(line.split()[1:]) == 0
    printed = capsys.readouterr().out
    assert f"$ {line}\n{printed}```" in reference
    for key in json.loads(printed):
        assert f"`{key}`" in reference


def test_printed_timelines_are_what_is_printed_now(capsys):
    page = (ROOT / "docs" / "tutorials" / "quickstart.md").read_text()
    command = "pipeloom simulate 1f1b --ranks 4 --microbatches 8"
    shown = re.search(rf"\$ {command}\n(.*?)\n\.\.\.", page, re.DOTALL)[1]
    assert cli.main(command.split()[1:]) == 0
    printed = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
    assert printed.startswith(shown)


def test_printed_memory_is_what_is_printed_now(capsys):
    page = (ROOT / "docs" / "how-to" / "memory.md").read_text()
    blocks = re.findall(r"```console\n\$ pipeloom (.*?)\n(.*?)\n```", page, re.DOTALL)
    assert len(blocks) == 7
    for words, shown in blocks:
        if "--run" not in words:
            assert cli.main(words.split()) == 0
            printed = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
            assert printed.startswith(shown.removesuffix("...").rstrip()), words


@pytest.mark.parametrize("name", [*NAMES, "examples/train_mlp.py", "examples/train_gpt.py"])
def test_the_project_speaks_of_itself_alone(name):
    text = (ROOT / name).read_text()
    assert not re.search(r"(?<![\w.])/(work|tmp|root|home)/", text)
    assert not re.search(r"\bissue #?\d|#\d+\b", text)
