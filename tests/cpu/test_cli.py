"""The command line: what is refused, in one line with exit code 2, before any rank exists; and what a config means."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from pipeloom.cli import COMMANDS, main
from pipeloom.cli.common.parser import did_you_mean
from pipeloom.cli.common.train_options import MOST_USED
from pipeloom.cli.train import parse
from pipeloom.processes import launcher
from pipeloom.train.checkpoint.directory import in_use
from pipeloom.train.config.option_list import options
from pipeloom.train.config.schedule import parse_cut
from pipeloom.train.config.train_config import TrainConfig
from pipeloom.train.config.validate import validate
from pipeloom.train.output.directory import repeatable, to_yaml
from pipeloom.version import __version__

Refused = Callable[..., str]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    directory = tmp_path / "text"
    directory.mkdir()
    for number in range(4):
        (directory / f"{number}.txt").write_text("the loom weaves micro-batches into a cloth of gradients. " * 40)
    return directory


@pytest.fixture
def refused(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Refused:
    """Run ``pipeloom train`` with a tiny model and `words`; it must refuse in one line before it starts a rank."""
    monkeypatch.setattr(launcher, "launch", lambda *_: pytest.fail("ranks were started"))

    def run(*words: str) -> str:
        base = ["--data.path", str(text), "--output_dir", str(tmp_path / "out"), "--model.sequence_length", "16"]
        base += [
            "--model.width",
            "16",
            "--model.heads",
            "2",
            "--model.layers",
            "4",
            "--data.validation_fraction",
            "0.3",
        ]
        capsys.readouterr()
        assert main(["train", *base, *words]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1, captured.err
        assert captured.err.startswith(("pipeloom: error: ", "pipeloom train: error: "))
        return captured.err

    return run


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--batch.microbatches 0", "batch.microbatches=0: must be at least 1"),
        ("--batch.microbatches -3", "batch.microbatches=-3: must be at least 1"),
        (
            "--batch.size 3 --batch.microbatches 4",
            "batch.size=3: each of 4 micro-batches needs a sample. Raise batch.size to 4",
        ),
        ("--parallel.pipeline 5", "parallel.pipeline=5: each stage needs a block, and model.layers=4"),
        ("--parallel.pipeline 0", "parallel.pipeline=0: must be at least 1"),
        ("--schedule 1f1", "schedule '1f1' is unknown.*Did you mean '1f1b'"),
        ("--steps -1", "steps=-1: must be at least 0"),
        ("--steps 1.5", "steps"),
        ("--seed -1", "seed=-1: must be at least 0"),
        ("--save_total_limit 0", "save_total_limit=0: must be at least 1"),
        ("--model.width 0", "model.width=0: must be at least 1"),
        ("--model.heads 3", "model width=16 is not a multiple of heads=3. Use heads=2"),
        ("--model.heads 16", "rotary positions need an even one"),
        ("--model.positions sinus", "model.positions"),
        ("--model.dropout 1", "model.dropout=1.0: must be at least 0 and below 1"),
        ("--optimizer.learning_rate -1", "optimizer.learning_rate=-1.0: must be finite and at least 0"),
        ("--optimizer.learning_rate .nan", "optimizer.learning_rate=nan: must be finite and at least 0"),
        ("--optimizer.learning_rate .inf", "optimizer.learning_rate=inf: must be finite and at least 0"),
        ("--optimizer.beta2 1", "optimizer.beta2=1.0: must be at least 0 and below 1"),
        ("--parallel.cut 3,2", "parallel.cut=3,2: has 2 stages with 5 blocks; the run has 2 stages and 4"),
        ("--parallel.cut 3,2", "4 blocks. Give 2 numbers with the sum 4"),
        ("--parallel.cut 4", "1 stages with 4 blocks; the run has 2 stages"),
        ("--parallel.cut blocks", "parallel.cut=blocks: must be layers, parameters, time, or blocks per stage"),
        ("--parallel.transport pigeon", "parallel.transport"),
        ("--data.path nowhere", "data path 'nowhere' does not exist"),
        ("--data.validation_fraction 2", "data.validation_fraction=2.0: must be at least 0 and below 1"),
        ("--data.tokenizer nowhere.json", "tokenizer nowhere.json"),
        ("--model.sequence_length 100000", "one window needs 100001"),
        ("--data.validation_fraction 0", "0 tokens.*Increase data.validation_fraction, use --eval_steps 0, add"),
        ("--batch.size 5000 --batch.microbatches 5000", "validation data has .* samples"),
        ("--output_dir /proc/nowhere/out", "output_dir=/proc/nowhere/out: cannot be written .No such"),
        ("--resume_from_checkpoint latest", "resume_from_checkpoint=latest: .*has no finished checkpoint. Use auto"),
        ("--resume_from_checkpoint nowhere", "nowhere is not a directory"),
        ("--stesp 3", "option --stesp is unknown: did you mean --steps"),
        ("--model.layesr=3", "option --model.layesr is unknown: did you mean --model.layers"),
        ("--layers 3", "did you mean --model.layers"),
        ("--step 3", "option --step is unknown: did you mean --steps"),
        ("--config", "option --config needs a value: the path of a YAML file"),
        ("--config nowhere.yaml", "--config=nowhere.yaml: cannot be read as YAML: .*No such file"),
        ("extra", "argument 'extra' is unexpected. Remove it"),
        ("--output_dir null", "output_dir=null: must be a directory"),
        ("--seed 18446744073709551616", "seed=18446744073709551616: must be below 2..64"),
        ("--parallel.cut 4,0", "parallel.cut=4,0: stage 1 has no block. Give it one, or lower parallel.pipeline.$"),
        (
            "--schedule interleaved --parallel.cut 4,0,0,0",
            "Give it one, or lower parallel.pipeline or parallel.chunks.$",
        ),
        ("--schedule hanayo --parallel.pipeline 4", "Use --model.layers 8 or more, or lower parallel.pipeline.$"),
        ("--schedule zb-v --parallel.cut 4,0,0,0", "Give it one, or lower parallel.pipeline.$"),
        ("--local --parallel.transport torch", "parallel.transport=torch: has no effect with --local"),
        ("--optimizer.learning_rate nan", "optimizer.learning_rate=nan: must be a finite number"),
        ("--steps 1e3", "steps=1000.0: must be an integer. Write 1000"),
        ("--save_total_limit x", "save_total_limit=x: must be an integer"),
        ("--steps", "option --steps needs a value"),
        ("--data.path=", "option --data.path has an empty value"),
        ("--print_config --steps -1", "steps=-1: must be at least 0"),
        ("--data.path /dev/zero", "is a device, a pipe or a socket"),
        (
            "--model.layers 100000000 --model.width 1024 --model.heads 16",
            "training needs at least .* [GT]iB for the model",
        ),
        ("--model.experts 100000000", "model.experts=100000000, model.layers=.*needs at least .* TiB for the model"),
        ("--batch.size 1000000000", "batch.size=1000000000 in 8 micro-batches.*training needs at least"),
        ("--batch.size 1000000000 --batch.microbatches 1000000000 --model.layers 100000", "training needs at least"),
        ("--parallel.slices 17", "parallel.slices=17: must be at most model.sequence_length=16"),
        ("--parallel.slices 8,7", "parallel.slices=8,7: must add up to model.sequence_length=16, not 15"),
        ("--parallel.slices many", "parallel.slices=many: must be auto, a number, or lengths"),
        ("--parallel.slices 2 --schedule gpipe", "parallel.slices=2: schedule 'gpipe' runs whole sequences.*terapipe"),
        ("--parallel.slices auto --schedule 1f1b", "parallel.slices=auto: schedule '1f1b' runs whole sequences"),
        (
            "--parallel.slices auto --schedule seq1f1b-interleaved --parallel.chunks 2",
            "parallel.slices=auto: .*a divisor of parallel.pipeline",
        ),
        ("--parallel.data 0", "parallel.data=0: must be at least 1"),
        ("--parallel.data -1", "parallel.data=-1: needs a running process group. Outside torchrun, give"),
        (
            "--parallel.data 2 --local --model.dropout 0.1",
            "model.dropout=0.1: with --local and several ranks per stage",
        ),
        (
            "--parallel.data 5 --batch.size 32 --batch.microbatches 8",
            "batch.size=32: each of 8 micro-batches of each of 5 replicas needs",
        ),
        (
            "--parallel.data 3 --batch.size 900 --batch.microbatches 300",
            r"validation data has .* of each of 3 replicas needs a sample, 900 in all",
        ),
        ("--parallel.order pp", "parallel.order=pp: must be dp,pp or pp,dp"),
        ("--parallel.data_granularity chunk", "Use 'step', or strategy zero2 or zero3"),
        ("--parallel.data_strategy zero4", "parallel.data_strategy"),
        (
            "--parallel.data 2 --schedule pipedream",
            "parallel.data=2: does not work with asynchronous schedule 'pipedream'",
        ),
        (
            "--precision.dtype bf16 --schedule pipedream",
            "precision.dtype=bf16: does not work with asynchronous schedule 'pipedream'",
        ),
        ("--parallel.data 2 --optimizer.barrier false", "optimizer.barrier=false: does not work with parallel.data=2"),
        ("--precision.dtype fp8", "precision.dtype"),
        ("--precision.dtype fp16 --precision.gradients same", "leave its range"),
        ("--precision.loss_scale 0", "precision.loss_scale=0.0: must be finite and at least 1"),
        ("--precision.loss_scale_steps 0", "precision.loss_scale_steps=0: must be at least 1"),
        ("--optimizer.name adagrad", "optimizer.name"),
        ("--optimizer.momentum 1", "optimizer.momentum=1.0: must be at least 0 and below 1"),
        (
            "--optimizer.momentum 0.5",
            "momentum=0.5: has no effect with optimizer.name=adamw. Remove it, or use momentum",
        ),
        ("--optimizer.beta2 0.5 --optimizer.name sgd", "beta2=0.5: has no effect with optimizer.name=sgd"),
        (
            "--optimizer.muon_learning_rate 1 --optimizer.name momentum",
            "rate=1.0: has no effect with optimizer.name=momentum",
        ),
        ("--precision.loss_scale 2 --precision.dtype bf16", "loss_scale=2.0: has no effect with precision.dtype=bf16"),
        ("--precision.loss_scale_steps 2", "loss_scale_steps=2: has no effect with precision.dtype=fp32"),
        (
            "--memory.offload cpu --memory.offload_states false",
            "memory.offload=cpu: has no effect where states, parameters and activations",
        ),
        ("--memory.offload_states false", "offload_states=false: has no effect without memory.offload"),
        (
            "--parallel.data_granularity chunk --parallel.data_strategy zero2",
            "data_strategy=zero2: has no effect with one data-parallel replica",
        ),
        (
            "--parallel.data_strategy zero3",
            "zero3: has no effect with one data-parallel replica.*or add --memory.offload_parameters",
        ),
        (
            "--parallel.data_strategy zero1 --precision.dtype bf16",
            "zero1: has no effect with one data-parallel replica",
        ),
        (
            "--parallel.data_bucket_bytes 1MiB --precision.dtype bf16",
            "data_bucket_bytes=1MiB: has no effect with one data-parallel replica",
        ),
        ("--parallel.order pp,dp", "order=pp,dp: has no effect with one data-parallel replica"),
        (
            "--parallel.data_strategy parameter-server --precision.dtype bf16 --memory.offload cpu "
            "--memory.offload_parameters true",
            "parameter-server: has no effect with one data-parallel replica",
        ),
    ],
)
def test_bad_input_is_refused_in_one_line(refused: Refused, words: str, expected: str) -> None:
    assert re.search(expected, refused(*words.split()))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("stesp: 3\n", "key stesp is unknown: did you mean steps"),
        ("model:\n  layesr: 3\n", "key model.layesr is unknown: did you mean model.layers"),
        ("modle: {layers: 3}\n", "key modle.layers is unknown: did you mean model.layers"),
        ("layers: 3\n", "did you mean model.layers"),
        ("model: {layers: {more: 3}}\n", "key model.layers.more is unknown"),
        ("model: 3\n", "model=3: must hold keys, such as model.layers"),
        ("model: {layers: many}\n", "run.yaml: model.layers=many: must be an integer."),
        ("- steps\n", "has no keys"),
        ("", "has no keys"),
        ("steps: 3\nsteps: 4\n", "line 2: key steps is duplicated"),
        ("model: {width: 3, width: 4}\n", "key width is duplicated"),
        ("model.layers: 3\nmodel: {layers: 4}\n", "key model.layers is duplicated"),
        ("? [a, b]\n: 3\n", "line 1: the key is a list or a mapping: a key must be a word"),
        ("steps: 2026-13-41\n", "cannot be read"),
        ("model: &m {more: *m}\n", "cannot be read"),
        ("data: {path: ''}\n", "data.path has an empty value"),
        ("output_dir: null\n", "output_dir=null: must have a value"),
        ("steps:\n", "steps=null: must have a value"),
        ("parallel: {slices: [28, 100]}\n", "lists are unsupported. Write 28,100"),
        ("steps: [3\n", "cannot be read"),
        ("steps: \xff\n", "cannot be read"),
    ],
)
def test_a_bad_config_file_is_refused_in_one_line(
    refused: Refused, tmp_path: Path, content: str, expected: str
) -> None:
    file = tmp_path / "run.yaml"
    file.write_bytes(content.encode("latin-1"))
    assert expected in refused("--config", str(file))


def test_a_config_file_that_is_a_pipe_is_refused(refused: Refused, tmp_path: Path) -> None:
    reader, writer = os.pipe()  # as `--config <(echo "steps: 9")` has it
    os.write(writer, b"steps: 9\n")
    os.close(writer)
    assert "must be a file, not a device or a pipe" in refused("--config", f"/dev/fd/{reader}")
    os.close(reader)
    os.mkfifo(tmp_path / "run.yaml")  # nobody writes: reading it would wait for ever
    assert "must be a file, not a device or a pipe" in refused("--config", str(tmp_path / "run.yaml"))


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe\x00binary\x00"])
def test_data_without_text_is_refused(refused: Refused, tmp_path: Path, content: bytes | None) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    if content is not None:
        (empty / "file.txt").write_bytes(content)
    assert "Training needs text" in refused("--data.path", str(empty))


def test_an_unknown_environment_variable_is_refused(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPELOOM_STESP", "3")
    assert "PIPELOOM_STESP is unknown: did you mean PIPELOOM_STEPS" in refused()
    monkeypatch.delenv("PIPELOOM_STESP")
    monkeypatch.setenv("PIPELOOM_MODEL__LAYERS", "")
    assert "variable PIPELOOM_MODEL__LAYERS has an empty value" in refused()


def test_a_group_of_another_size_is_refused(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    assert "rank 0: 3 processes for 2 pipeline ranks: each process runs one rank. Start torchrun with 2" in refused()
    assert "parallel.data=2: 2 replicas of 2 ranks are 4 processes, not 3" in refused("--parallel.data", "2")
    assert "a multiple of 2. Start 4" in refused("--parallel.data", "-1")
    assert "--local runs all ranks in one process, but torchrun started 3" in refused("--local")


@pytest.mark.parametrize(
    "words", ["--batch.microbatches 0", "--resume_from_checkpoint nowhere", "--model.sequence_length 100000"]
)
def test_nothing_is_made_by_what_is_refused(refused: Refused, tmp_path: Path, words: str) -> None:
    refused(*words.split(), "--output_dir", str(tmp_path / "new" / "out"))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "words", [("train", "--output_dir", ""), ("report", ""), ("slice", "--costs", ""), ("simulate", "1f1b", "--svg=")]
)
def test_empty_values_are_refused(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "has an empty value" in error
    assert error.count("\n") == 1


def test_missing_options_are_named_as_they_are_typed(capsys: pytest.CaptureFixture[str]) -> None:
    for words, missing in (("simulate 1f1b --ranks 2", "--microbatches is"), ("checkpoint ls", "argument dir is")):
        assert main(words.split()) == 2
        assert f"error: {missing} missing" in capsys.readouterr().err


def test_a_directory_in_use_is_refused_before_ranks_start(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with in_use(tmp_path / "out"):
        assert "is in use by another run" in refused()


def test_the_launcher_holds_the_directory_while_ranks_run(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = []

    def launch(*_: object) -> int:
        descriptor = os.open(tmp_path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            held.append(True)
        os.close(descriptor)
        return 0

    monkeypatch.setattr(launcher, "launch", launch)
    assert main(["train", "--output_dir", str(tmp_path), "--data.path", str(text)]) == 2 * (not held)


def test_any_terminal_can_show_what_is_printed(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONIOENCODING": "ascii",
        "PYTHONUTF8": "0",
        "LC_ALL": "C",
        "PYTHONCOERCECLOCALE": "0",
    }
    program = (
        "import sys; from pipeloom.cli import main; from pipeloom.cli.train import parse\n"
        "assert main(['schedules']) == 0\n"
        "prompt = parse(['--sample_prompt', sys.argv[1]]).sample_prompt\n"
        "assert prompt.encode() == b'h\\xc3\\xa9', ascii(prompt)\n"
        "print(prompt)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, "hé"], capture_output=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(b"h?\n")
    assert re.search(rb"\nseq1f1b-interleaved +Seq1F1B, arXiv:2406.03488 +k slices per sequence; v", done.stdout)


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("schedules >/dev/full", 1, "standard output cannot be written: No space left on device"),
        ("schedules >&-", 0, ""),
        ("schedules <&- >&- 2>&-", 0, ""),
        ("train --print_config >/dev/full", 1, "cannot be written"),
        ("train {tiny} >/dev/full", 0, "warning: standard output cannot be written: No space left on device; the run"),
        ("train --print_config <&- >&-", 0, ""),
    ],
)
def test_output_that_nobody_can_read(text: Path, tmp_path: Path, command: str, code: int, said: str) -> None:
    """A command fails in one line; a run goes on after one."""
    out = tmp_path / "out"
    tiny = f"--data.path {text} --output_dir {out} --steps 1 --sample_tokens 0 --eval_steps 0 --save_steps 0"
    tiny += " --model.layers 2 --model.width 16 --model.heads 2 --model.sequence_length 16 --batch.size 4"
    tiny += " --parallel.pipeline 1"
    words = f"exec {sys.executable} -m pipeloom {command.format(tiny=tiny)}"
    done = subprocess.run(["sh", "-c", words], stderr=subprocess.PIPE, text=True, check=False, timeout=300)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert done.stderr.count("\n") == bool(said), done.stderr
    assert ("{tiny}" in command) == (out / "report.html").exists()


def test_a_reader_that_goes_away_ends_no_run(capfd: pytest.CaptureFixture[str]) -> None:
    program = (
        "import sys; from pipeloom.cli.common.standard_streams import standard_streams\n"
        "with standard_streams(lasting=sys.argv[1] == 'train'):\n"
        "    for _ in range(3): print('x' * 100_000, flush=True)\n"
        "sys.stderr.write('goes on\\n')\n"
    )
    for command, said in (("train", "Broken pipe; the run continues without it"), ("simulate", "BrokenPipeError")):
        reader, writer = os.pipe()
        os.close(reader)
        subprocess.run([sys.executable, "-c", program, command], stdout=writer, check=False)
        os.close(writer)
        told = capfd.readouterr().err
        assert said in told
        assert ("goes on\n" in told) == (told.count("\n") == 2)


def test_an_interrupt_is_answered_from_the_first_import_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = "import sys; before = set(sys.modules); import pipeloom.cli; print(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    own = {"pipeloom", "pipeloom.cli", "pipeloom.common", "pipeloom.common.lazy_exports", "pipeloom.errors"}
    light = own | {"pipeloom.version", "__future__", "warnings"}
    assert {name for name in done.stdout.split() if not name.startswith("importlib")} <= light

    def interrupted(name: str) -> None:
        raise RuntimeError("Error calling __set_name__") from KeyboardInterrupt()

    monkeypatch.setattr("pipeloom.cli.importlib.import_module", interrupted)
    assert main(["schedules"]) == 130
    assert capsys.readouterr().err == "pipeloom: error: interrupted\n"


def test_config_files_count_less_than_the_environment_and_that_less_than_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("steps: 5\nseed: 5\nmodel: {layers: 5, width: 320}\nbatch: {size: 50}\n")
    monkeypatch.setenv("PIPELOOM_SEED", "6")
    monkeypatch.setenv("PIPELOOM_MODEL__LAYERS", "6")
    monkeypatch.setenv("PIPELOOM_BATCH__SIZE", "60")
    config = parse(["--model.layers", "7", "--batch.size=70", "--config", str(file)])  # wherever the file stands
    assert (config.steps, config.model.width) == (5, 320)
    assert config.seed == 6
    assert (config.model.layers, config.batch.size) == (7, 70)
    assert config.model.heads == TrainConfig().model.heads
    monkeypatch.setenv("PIPELOOM_CONFIG", str(file))
    assert parse([]).steps == 5


def test_a_config_survives_yaml(tmp_path: Path) -> None:
    words = "--local --model.tie_embeddings --save_total_limit null --optimizer.learning_rate 1e-05 --sample_prompt=é: "
    config = parse([*words.split(), "--parallel.cut", "3,3"])
    assert config.local
    assert config.model.tie_embeddings
    assert config.save_total_limit is None
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config), encoding="utf-8")
    assert parse(["--config", str(file)]) == config
    assert TrainConfig.from_mapping(yaml.safe_load(to_yaml(config))) == config
    assert parse([]) == TrainConfig()


def test_print_config_is_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--print_config", "--steps", "3"]) == 0
    file = tmp_path / "config.yaml"
    file.write_text(capsys.readouterr().out)
    assert parse(["--config", str(file)]).steps == 3


def test_a_repeatable_config_has_absolute_paths_and_begins_at_the_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = repeatable(parse(["--data.path", "text/*.txt", "--output_dir", "out"]))
    assert (config.data.path, config.output_dir) == (f"{tmp_path}/text/*.txt", f"{tmp_path}/out")
    assert config.data.tokenizer is None
    for own in ("latest", "auto", "out/checkpoint-3"):
        assert (
            repeatable(parse(["--output_dir", "out", "--resume_from_checkpoint", own])).resume_from_checkpoint is None
        )
    other = repeatable(parse(["--output_dir", "out", "--resume_from_checkpoint", "other/checkpoint-3"]))
    assert other.resume_from_checkpoint == f"{tmp_path}/other/checkpoint-3"


def test_cuts() -> None:
    assert parse_cut(parse(["--parallel.cut", "time"]), 2) == "time"
    assert parse_cut(parse(["--parallel.cut", "4, 2"]), 2) == [4, 2]


def test_the_default_run_is_valid(tmp_path: Path) -> None:
    validate(parse(["--output_dir", str(tmp_path)]), world_size=None)


def test_every_option_has_a_help_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert all(option.help for option in options())
    assert main(["train", "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  --{option.key} " in shown for option in options())
    assert "PIPELOOM_MODEL__LAYERS=8" in shown


def test_the_help_of_train_fits_the_eye(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups in order, the ten most used options first, one line for each option, environment variables named once."""
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["train", "--help"]) == 0
    wide = capsys.readouterr().out
    groups = ["most used", "data", "model", "parallel", "batch", "optimizer", "memory", "output"]
    groups += ["device", "faults", "configuration"]
    assert re.findall(r"^([a-z ]+):$", wide, re.MULTILINE) == [*groups, "examples"]
    first = re.search(r"^most used:\n(.*?)\n\n", wide, re.MULTILINE | re.DOTALL)
    assert first is not None
    assert re.findall(r"^  --(\S+) ", first[1], re.MULTILINE) == list(MOST_USED)
    lines = [line for line in wide.partition("examples:")[0].splitlines() if line.startswith("  ")]
    assert len(lines) == len(list(options())) + 3  # --config, --print_config, --help
    for line, option in ((line, option) for line in lines for option in options() if f"  --{option.key} " in line):
        assert line.endswith(f"(default: {option.default_text})"), line
    assert max(map(len, wide.partition("examples:")[0].splitlines())) <= 120
    assert "ENV:" not in wide
    assert "ARG:" not in wide
    assert wide.count("PIPELOOM_MODEL__LAYERS") == 1
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["train", "--help"]) == 0
    narrow = capsys.readouterr().out.partition("examples:")[0]
    assert max(map(len, narrow.splitlines())) <= 80
    assert narrow.count("(default: ") == len(list(options()))


def test_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"pipeloom {__version__}\n"
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in COMMANDS)
    for words, hint in ((["trian"], "did you mean train?"), (["--vresion"], "did you mean --version?")):
        assert main(words) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert hint in error
    assert main([]) == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_and_refuses_an_unknown_option(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--help"]) == 0
    assert "examples:" in capsys.readouterr().out
    assert main([command, "--no-such-option"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error


def test_nearest_names() -> None:
    known = ["--steps", "--model.layers", "--save_steps"]
    assert did_you_mean("--stpes", known) == "did you mean --steps?"
    assert did_you_mean("--layer", known) == "did you mean --model.layers?"
    assert did_you_mean("--zzz", known) is None


def test_the_launcher_and_the_light_commands_import_no_torch() -> None:
    program = """
import sys
from pipeloom.cli import main
from pipeloom.processes import launcher
launcher.launch = lambda *_, **__: 0
import tempfile
with tempfile.TemporaryDirectory() as out:
    assert main(["train", "--output_dir", out]) == 0
assert main(["simulate", "1f1b", "--ranks", "2", "--microbatches", "4", "--json"]) == 0
assert main(["schedules", "--json"]) == 0
assert "torch" not in sys.modules, "torch was imported"
"""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PIPELOOM_")}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
