"""Examples and the code in the documentation run as they are printed, in one process and in several."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import re
import runpy
import subprocess
import sys
import tempfile
from base64 import b64decode
from contextlib import redirect_stdout
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.run

from pipeloom import cli
from tests.cpu.ranks import run_ranks

ROOT = Path(__file__).parents[2]
Capture = pytest.CaptureFixture[str]
EXAMPLES = {
    "train_mlp.py": ["--steps", "3", "--width", "16"],
    "own_schedule.py": ["--steps", "3"],
    "train_gpt.py": ["--steps", "3", "--layers", "2", "--width", "16"],
    "train_huggingface.py": ["--steps", "3", "--layers", "2", "--width", "16"],
}
TRAINER = "train_transformers_trainer.py"
FOUR_PROCESSES = {"train_zero.py", "train_under_cap.py"}  # copies of a pipeline are processes
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
CODE = re.compile(r"(?:<!-- (not run|needs \w+) -->\n)?```python\n(.*?)```", re.DOTALL)


def _needs(name: str) -> None:
    """Skip what needs a package that is not installed."""
    if "huggingface" in name:
        pytest.importorskip("transformers", reason="transformers is not installed (the extra 'huggingface')")


def _here(script: Path, options: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a script prints in this process."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "argv", [str(script), *options])
        runpy.run_path(str(script), run_name="__main__")
    return capsys.readouterr().out


def test_the_notebook_runs_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its cells, one after another, without Jupyter: what they show is kept."""
    shown: list[str] = []
    kept: dict[str, object] = {"SVG": str, "IFrame": lambda source, **sizes: source, "display": shown.append}
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(display=SimpleNamespace(**kept)))
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(**kept))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    notebook = json.loads((ROOT / "examples" / "tour.ipynb").read_text())
    names: dict[str, object] = {"__name__": "__main__"}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    schedules, timelines, report = shown
    assert all(name in schedules for name in ("gpipe", "1f1b", "zb-h1"))
    assert timelines.startswith("<svg")
    assert b"<!doctype html>" in b64decode(report.partition(",")[2])
    losses = re.search(r"^loss (\S+) -> (\S+)$", capsys.readouterr().out, re.MULTILINE)
    assert losses is not None
    assert float(losses[2]) < float(losses[1]) / 2


def test_the_notebook_runs_in_jupyter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a kernel of this interpreter, whose files are all below `tmp_path`."""
    for package in ("nbclient", "ipykernel"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install nbclient ipykernel")
    import nbformat
    from nbclient import NotebookClient

    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR", "TMPDIR"):
        monkeypatch.setenv(name, str(tmp_path))
    notebook = nbformat.read(ROOT / "examples" / "tour.ipynb", as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=240, kernel_name="python3", resources=resources).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    pictures = [output.data for output in outputs if output.output_type == "display_data"]
    assert [sorted(data)[0] for data in pictures] == ["image/svg+xml", "image/svg+xml", "text/html"]
    assert "<iframe" in pictures[-1]["text/html"]
    assert "loss " in "".join(output.text for output in outputs if output.output_type == "stream")


def _agent(words: list[str], directory: Path, streams: tuple[int, int]) -> None:
    """What ``torchrun WORDS`` does, in this process, which ends with it."""
    for number, stream in enumerate(streams, 1):
        os.dup2(stream, number)
    os.chdir(directory)
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    torch.distributed.run.main(words)


def _torchrun(script: Path, options: list[str], directory: Path) -> str:
    """What a script prints as two processes, which are new interpreters; torchrun itself is a fork."""
    words = ["--standalone", "--nproc-per-node", "2", str(script), *options]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        streams = out.fileno(), errors.fileno()
        agent = multiprocessing.get_context("fork").Process(target=_agent, args=(words, directory, streams))
        agent.start()
        agent.join(400)
        out.seek(0), errors.seek(0)
        assert agent.exitcode == 0, errors.read()
        return out.read()


def _blocks(page: str) -> list[str]:
    """The Python code of a page, but for what says that it does not run or needs a package that is not installed."""
    found = CODE.findall((ROOT / page).read_text())
    return [code for mark, code in found if not mark or (mark.startswith("needs ") and find_spec(mark.split()[1]))]


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_print_the_same_in_one_process_and_in_two(name: str, capsys: Capture) -> None:
    """With a group that is there; under torchrun: `test_the_readme_example_runs_as_printed`."""
    _needs(name)
    script = ROOT / "examples" / name
    alone = _here(script, EXAMPLES[name], capsys)
    assert re.search(r"^step 3  loss \d", alone, re.MULTILINE)
    assert "".join(run_ranks(_as_rank, 2, script, EXAMPLES[name])) == alone


@pytest.mark.whole_grid
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_print_the_same_under_torchrun(name: str, tmp_path: Path, capsys: Capture) -> None:
    _needs(name)
    script = ROOT / "examples" / name
    assert _torchrun(script, EXAMPLES[name], tmp_path) == _here(script, EXAMPLES[name], capsys)


def test_every_example_is_tested() -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == EXAMPLES.keys() | FOUR_PROCESSES | {TRAINER}


def _as_rank(rank: int, script: Path, options: list[str]) -> str:
    """What a script prints as one of several processes that formed a group already."""
    with pytest.MonkeyPatch.context() as patched, redirect_stdout(StringIO()) as printed:
        patched.setattr(dist, "init_process_group", lambda backend: None)
        patched.setattr(dist, "destroy_process_group", lambda: None)
        patched.setattr(sys, "argv", [str(script), *options])
        runpy.run_path(str(script), run_name="__main__")
    return printed.getvalue()


def test_the_example_of_trainer_prints_the_same_in_one_process_and_in_two(capsys: Capture) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed (the extra 'trainer')")
    script = ROOT / "examples" / TRAINER
    alone = _here(script, ["--steps", "3"], capsys)
    assert re.search(r"^step 3  eval loss \d", alone, re.MULTILINE)
    assert run_ranks(_as_rank, 2, script, ["--steps", "3"]) == [alone, ""]


def test_the_example_of_zero_goes_on_from_its_checkpoint_with_whole_copies(tmp_path: Path) -> None:
    script = ROOT / "examples" / "train_zero.py"
    saving = ["--output", str(tmp_path / "checkpoints")]

    def losses(options: list[str]) -> list[str]:
        printed = "".join(run_ranks(_as_rank, 4, script, options))
        held = [int(count) for count in re.findall(r"process \d updates (\d+) of", printed)]
        total = int(re.findall(r" of (\d+) parameters", printed)[0])
        assert len(held) == 4
        assert sum(held) == total * (1 if "ddp" not in options else 2)
        return re.findall(r"^step \d  loss \d.*", printed, re.MULTILINE)

    whole = losses(["--steps", "4"])
    assert losses(["--steps", "2", *saving])[-1].startswith("step 2  loss")
    assert losses(["--steps", "4", *saving, "--data", "ddp"]) == whole


def _as_rank_without_holes(rank: int, script: Path, options: list[str]) -> str:
    """`_as_rank` whose tensors get no memory that this process has already: all count under a cap."""
    m_mmap_threshold = -3
    assert ctypes.CDLL(None).mallopt(m_mmap_threshold, 1 << 16)
    return _as_rank(rank, script, options)


def test_a_training_state_over_the_cap_of_memory_trains_with_zero3_alone() -> None:
    script = ROOT / "examples" / "train_under_cap.py"
    torch.optim.SGD([torch.zeros(1)])  # loads torch._dynamo, which would count under the cap
    # What earlier tests left in a process may give it more room than its cap; ddp needs over 100 MB more.
    small = ["--width", "704", "--cap", "300", "--steps", "2"]
    assert "step 2  loss" in run_ranks(_as_rank_without_holes, 4, script, small)[0]
    with pytest.raises(AssertionError, match="can't allocate memory"):
        run_ranks(_as_rank_without_holes, 4, script, [*small, "--data", "ddp"])


def test_the_schedule_of_the_example_on_the_command_line(tmp_path: Path, capsys: Capture) -> None:
    own = f"{ROOT / 'examples' / 'own_schedule.py'}:eager_one_f_one_b"
    assert cli.main(["simulate", own, "--ranks", "4", "--microbatches", "8", "--latency", "0.25", "--json"]) == 0
    eager = json.loads(capsys.readouterr().out)
    assert cli.main(["simulate", "1f1b", "--ranks", "4", "--microbatches", "8", "--latency", "0.25", "--json"]) == 0
    assert eager["makespan_seconds"] < json.loads(capsys.readouterr().out)["makespan_seconds"]
    small = ["--model.layers", "2", "--model.width", "16", "--model.heads", "2", "--model.sequence_length", "16"]
    run = ["--steps", "2", "--eval_steps", "0", "--save_steps", "0", "--sample_tokens", "0", "--local"]
    assert cli.main(["train", "--schedule", own, *small, *run, "--output_dir", str(tmp_path / "run")]) == 0
    assert f"schedule: {own}" in (tmp_path / "run" / "config.yaml").read_text()


def test_train_gpt_takes_a_text(tmp_path: Path, capsys: Capture) -> None:
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
    assert "step 2  loss" in _here(ROOT / "examples" / "train_gpt.py", options, capsys)


def _as_torchrun_rank(rank: int, script: Path, options: list[str]) -> str:
    os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))  # this process ends with the test
    return _as_rank(rank, script, options)


def test_resnet50_in_four_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """Gradients of all four ways are those of the plain model. What it starts under torchrun are forks here."""
    script = ROOT / "examples" / "resnet50" / "compare.py"
    options = "--width 4 --batch 4 --splits 2,4 --classes 10 --rounds 1 --svg curve.svg"

    def forks(words: list[str], *, check: bool) -> None:
        assert words[: len(TORCHRUN) + 2] == [*TORCHRUN, "2", str(script)]
        assert check
        run_ranks(_as_torchrun_rank, 2, script, words[len(TORCHRUN) + 2 :])

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(subprocess, "run", forks)
    printed = _here(script, options.split(), capsys)
    rows = re.findall(r"^(naive|loop|pipe|pipeline) +(?:(\S+) +)?(\S+e[-+]\d+)$", printed, re.MULTILINE)
    assert [name for name, _, _ in rows] == ["naive", "loop", "pipe", "pipeline"]
    assert all(float(number) <= 1e-12 for _, *numbers in rows for number in numbers if number)
    assert (tmp_path / "curve.svg").read_text().count("<circle") == 8
    with pytest.raises(SystemExit):
        _here(script, ["--batch", "5", "--splits", "2", "--image", "32"], capsys)
    assert "--splits 2: leaves a split of one sample" in capsys.readouterr().err


def test_the_readme_example_runs_as_printed(tmp_path: Path, capsys: Capture) -> None:
    (code,) = _blocks("README.md")
    script = tmp_path / "mine.py"
    script.write_text(code)
    alone = _here(script, [], capsys)
    assert re.fullmatch(r"loss 0\.\d{4}\n", alone)
    both = _torchrun(script, [], tmp_path)  # each of the two ranks prints, perhaps at once
    assert re.findall(r"loss 0\.\d{4}", both) == [alone.strip()] * 2


PAGES = (
    "docs/tutorials/own-model.md",
    "docs/tutorials/training-loop.md",
    "docs/tutorials/new-schedule.md",
    "docs/how-to/stages.md",
    "docs/how-to/losses.md",
    "docs/how-to/post-validation.md",
    "docs/how-to/huggingface.md",
    "docs/how-to/data.md",
    "docs/how-to/slicing.md",
    "docs/how-to/traced-models.md",
    "docs/how-to/streams.md",
    "docs/how-to/partitioning.md",
    "docs/how-to/plans.md",
    "docs/how-to/reducing-memory.md",
    "docs/how-to/context-parallel.md",
    "docs/how-to/tensor-parallel.md",
    "docs/how-to/experts.md",
    "docs/how-to/generate.md",
    "docs/how-to/pipe.md",
    "docs/how-to/fine-tune.md",
    "docs/reference/checkpoints.md",
    "docs/how-to/masks.md",
    "docs/how-to/faults.md",
    "docs/how-to/plan.md",
)


@pytest.mark.parametrize("page", PAGES)
def test_code_in_the_documentation_runs_as_printed(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """What a comment says is printed, behind a print or at the end of a block, is printed."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for code in _blocks(page):
        exec(compile(code, page, "exec"), names)
        printed = capsys.readouterr().out
        for expected in re.findall(r"print\(.*\)  # (.*)$", code, re.MULTILINE):
            assert expected in printed.splitlines()
        at_end = re.search(r"(?:^# .*\n)+\Z", code, re.MULTILINE)
        if at_end:
            assert " ".join(printed.split()).endswith(" ".join(at_end[0].replace("# ", "").split()))


def test_all_code_that_is_not_run_says_so() -> None:
    run = {"README.md", *PAGES}
    for page in (ROOT / "docs").rglob("*.md"):
        name = str(page.relative_to(ROOT))
        assert name in run or not _blocks(name), name
