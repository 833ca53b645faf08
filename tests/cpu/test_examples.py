"""Examples and the code in the documentation run as they are printed, in one process and under torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = {
    "train_mlp.py": ["--steps", "3", "--width", "16"],
    "train_gpt.py": ["--steps", "3", "--layers", "2", "--width", "16"],
}
CODE = re.compile(r"(<!-- not run -->\n)?```python\n(.*?)```", re.DOTALL)


def _run(words: list[str], directory: Path) -> str:
    """Standard output of ``python WORDS``."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=directory,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _torchrun(script: Path, options: list[str], directory: Path) -> str:
    return _run(
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script), *options], directory
    )


def _blocks(page: str) -> list[str]:
    """The Python code of a page, but for what says that it does not run."""
    found = CODE.findall((ROOT / page).read_text())
    return [code for skipped, code in found if not skipped]


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_print_the_same_in_one_process_and_under_torchrun(name: str, tmp_path: Path) -> None:
    script = ROOT / "examples" / name
    alone = _run([str(script), *EXAMPLES[name]], tmp_path)
    assert re.search(r"^step 3  loss \d", alone, re.MULTILINE)
    assert _torchrun(script, EXAMPLES[name], tmp_path) == alone


def test_every_example_is_tested() -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == EXAMPLES.keys()


def test_train_gpt_takes_a_text(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    options = [
        "--text",
        str(text),
        "--ranks",
        "4",
        "--layers",
        "4",
        "--width",
        "16",
        "--schedule",
        "gpipe",
        "--steps",
        "2",
    ]
    assert "step 2  loss" in _run([str(ROOT / "examples" / "train_gpt.py"), *options], tmp_path)


def test_the_readme_example_runs_as_printed(tmp_path: Path) -> None:
    (code,) = _blocks("README.md")
    script = tmp_path / "mine.py"
    script.write_text(code)
    alone = _run([str(script)], tmp_path)
    assert re.fullmatch(r"loss 0\.\d{4}\n", alone)
    assert _torchrun(script, [], tmp_path) == alone * 2  # each of the two ranks prints


@pytest.mark.parametrize("page", ["docs/own-model.md", "docs/new-schedule.md"])
def test_code_in_the_documentation_runs_as_printed(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    names: dict[str, object] = {}
    for code in _blocks(page):
        exec(compile(code, page, "exec"), names)
        comments = [line[2:] for line in code.rstrip().splitlines() if line.startswith("# ")]
        printed = capsys.readouterr().out
        for comment in (comment for comment in comments if comment.startswith(("eager-1f1b", "1f1b "))):
            assert comment in printed.splitlines()
        for expected in re.findall(r"print\(.*\)  # (.*)$", code, re.MULTILINE):  # a comment says what is printed
            assert expected in printed.splitlines()


def test_all_code_that_is_not_run_says_so() -> None:
    run = {"README.md", "docs/own-model.md", "docs/new-schedule.md"}
    for page in (ROOT / "docs").glob("*.md"):
        name = f"docs/{page.name}"
        assert name in run or not _blocks(name), name
