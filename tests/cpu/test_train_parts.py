"""The parts of the trainer by themselves."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import resource
import signal
import statistics
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from pipeloom import schedules
from pipeloom.data.tokenizers import ByteTokenizer
from pipeloom.errors import InputError, RunError
from pipeloom.ir import Action, DataAxis, DataStrategy, Granularity, Op, Placement
from pipeloom.models import GPT, GPTConfig, init_parameters, loss_fn
from pipeloom.passes import lower, merge_backwards
from pipeloom.plan.memory import MemoryRow, write_memory
from pipeloom.sim import Costs, Network, simulate
from pipeloom.sim.data_link import DataLink
from pipeloom.split import split
from pipeloom.train.checkpoint.manifest import SEAL_NAME
from pipeloom.train.config.sections import BatchConfig, ModelConfig, OptimizerConfig, ParallelConfig
from pipeloom.train.config.train_config import TrainConfig
from pipeloom.train.data_parallel_costs import DataCosts, slowdown_of_host
from pipeloom.train.generation import generate
from pipeloom.train.optimizers import learning_rate, learning_rates, make_optimizer, set_learning_rates
from pipeloom.train.output.directory import Journal, prepare_output, writing
from pipeloom.train.output.display import describe, display, resume_notices, skipped_notice
from pipeloom.train.output.step_metrics import Predictor, StepCost, cost_numbers, message_times, read_cost
from pipeloom.train.process_group import Group
from pipeloom.train.run_checkpoints import agreed_checkpoint
from pipeloom.training import LossScaler, Pipeline

ROW = {
    "step": 3, "loss": math.nan, "grad_norm": 1.5, "lr": 1e-3, "tokens_per_second": 12345.6, "step_seconds": 0.5,
    "bubble_fraction": 0.125, "predicted_bubble_fraction": 0.111, "peak_memory_bytes": [2**30, 2**29],
}  # fmt: skip


def alone() -> Group:
    return Group(0, 1, torch.device("cpu"))


def test_all_processes_go_on_from_the_checkpoint_that_the_first_finds(tmp_path: Path) -> None:
    config = TrainConfig(output_dir=str(tmp_path), resume_from_checkpoint="auto")
    said: list[bytes] = []

    class OfTwo(Group):
        def all_gather(self, payload: bytes) -> list[bytes]:
            said.append(payload)
            return [said[0], payload]

    first, second = (OfTwo(rank, 2, torch.device("cpu")) for rank in range(2))
    assert agreed_checkpoint(config, first) is None
    for step in (2, 4):  # as another run, which goes on saving
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / SEAL_NAME).touch()
        assert agreed_checkpoint(config, second) == (tmp_path / "checkpoint-2" if step == 4 else None)
        said.clear()
        assert agreed_checkpoint(config, first) == tmp_path / f"checkpoint-{step}"


def test_learning_rate_warms_up_and_follows_a_cosine() -> None:
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=10, min_learning_rate_fraction=0.1)
    rates = [learning_rate(step, 111, config) for step in range(111)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert rates[10] == 1.0
    assert rates[60] == pytest.approx(0.55)  # half-way down
    assert rates[110] == pytest.approx(0.1)
    assert all(a >= b for a, b in pairwise(rates[10:]))
    assert learning_rate(500, 111, config) == pytest.approx(0.1)


@pytest.mark.parametrize(("num_steps", "warmup"), [(1, 0), (1, 5), (5, 5), (6, 5)])
def test_learning_rate_of_short_runs_is_finite(num_steps: int, warmup: int) -> None:
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=warmup)
    assert all(0 < learning_rate(step, num_steps, config) <= 1 for step in range(num_steps))


def test_matrices_decay_and_vectors_do_not() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    optimizer = make_optimizer(model.named_parameters(), OptimizerConfig(weight_decay=0.3))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert [decay[id(p)] for p in model.parameters()] == [0.3, 0.0, 0.0, 0.0]
    set_learning_rates(optimizer, [0.7, 0.8])
    assert [group["lr"] for group in optimizer.param_groups] == [0.7, 0.8]


def test_a_piece_of_a_matrix_decays_like_the_matrix() -> None:
    pieces = {"a.weight": nn.Parameter(torch.ones(4)), "a.bias": nn.Parameter(torch.ones(2))}
    optimizer = make_optimizer(pieces.items(), OptimizerConfig(), {"a.weight": (4, 2), "a.bias": (4,)})
    assert [group["params"][0] is piece for group, piece in zip(optimizer.param_groups, pieces.values(), strict=True)]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


def test_muon_takes_the_matrices_of_blocks_and_adamw_the_rest() -> None:
    config = OptimizerConfig(name="muon", muon_learning_rate=0.5, learning_rate=0.1, warmup_steps=0)
    names = ("embedding.weight", "blocks.0.qkv.weight", "blocks.0.norm.weight", "head.weight")
    torch.manual_seed(0)
    values = {name: torch.randn((4,) if "norm" in name else (4, 4)) for name in names}
    gradients = {name: torch.randn_like(value) for name, value in values.items()}

    def parameters() -> dict[str, nn.Parameter]:
        made = {name: nn.Parameter(value.clone()) for name, value in values.items()}
        for name, parameter in made.items():
            parameter.grad = gradients[name].clone()
        return made

    ours, theirs = parameters(), parameters()
    optimizer = make_optimizer(ours.items(), config)
    assert learning_rates(optimizer, 0, 100, config) == [0.5, 0.1, 0.1]
    muon = torch.optim.Muon([theirs[names[1]]], lr=0.5, weight_decay=0.1, momentum=config.momentum)
    adamw = torch.optim.AdamW(
        [{"params": [theirs[names[0]], theirs[names[3]]], "weight_decay": 0.1},
         {"params": [theirs[names[2]]], "weight_decay": 0.0}], lr=0.1, betas=(0.9, 0.95), fused=True,
    )  # fmt: skip
    for _ in range(3):
        optimizer.step()
        muon.step()
        adamw.step()
    assert all(torch.equal(ours[name], theirs[name]) for name in names)
    assert set(optimizer.state) == set(ours.values())


def test_the_loss_scale_backs_off_and_grows() -> None:
    scaler = LossScaler(8.0, growth_steps=2)
    scales = []
    for finite in (False, True, True, True, False, True, True):
        scaler.update(finite=finite)
        scales.append(scaler.scale)
    assert scales == [4.0, 4.0, 8.0, 8.0, 4.0, 4.0, 8.0]
    assert scaler.num_skipped == 2
    other = LossScaler()
    other.load(scaler.state())
    assert other.state() == scaler.state()
    with pytest.raises(InputError, match=r"scale=.*: must be finite and above 0\. Use a power of two\."):
        LossScaler(0.0)


def test_what_is_not_finite_is_null_in_metrics_and_shown_to_people(tmp_path: Path) -> None:
    Journal(None, tmp_path).write({**ROW, "grad_norm": math.inf})
    row = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert row["loss"] is None
    assert row["grad_norm"] is None
    assert row["peak_memory_bytes"] == ROW["peak_memory_bytes"]
    assert describe(ROW) == (
        "loss nan  grad norm 1.500  lr 1.00e-03  12,346 tokens/s  bubble 12.5% (predicted 11.1%)  memory 1024/512 MiB"
    )


def test_plain_lines_come_every_so_many_steps(capsys: pytest.CaptureFixture[str]) -> None:
    with display(shown=True, num_steps=7, done=1, log_steps=3) as shown:
        for step in range(2, 8):
            shown.step({**ROW, "step": step})
        shown.say("done [brackets] stay")
    with display(shown=False, num_steps=7, done=0, log_steps=1) as hidden:
        hidden.step(ROW)
        hidden.say("nothing")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[:-1]] == ["2/7", "3/7", "6/7", "7/7"]
    assert lines[-1] == "done [brackets] stay"


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with display(shown=True, num_steps=7, done=0, log_steps=3) as shown:
        shown.step({**ROW, "step": 7})
        shown.say("[saved]")
    text = terminal.getvalue()
    assert "7/7" in text
    assert "loss nan" in text
    assert "[saved]" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h")  # the cursor is back


def test_an_earlier_run_is_moved_aside_whole(tmp_path: Path) -> None:
    config = TrainConfig(output_dir=str(tmp_path))
    assert prepare_output(config, None, 0)[0] is None
    Journal(None, tmp_path).write({"step": 1})
    for number in (1, 2):
        assert prepare_output(config, None, 0)[0] == f"an earlier run was moved to {tmp_path / f'previous-{number}'}"
        Journal(None, tmp_path).write({"step": number + 1})
    assert json.loads((tmp_path / "previous-2" / "metrics.jsonl").read_text()) == {"step": 2}
    assert (tmp_path / "previous-1" / "config.yaml").exists()


def test_tokens_that_a_killed_run_did_not_finish_are_deleted(tmp_path: Path) -> None:
    tokens = tmp_path / "data" / "corpus-0.bin"
    tokens.parent.mkdir()
    dies = f"with whole_file(Path({str(tokens)!r})) as file: file.write(b'1'); file.flush(); os.kill(os.getpid(), 9)"
    code = f"import os\nfrom pathlib import Path\nfrom pipeloom.common.atomic_file import whole_file\n{dies}"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert len(list(tokens.parent.iterdir())) == 1
    prepare_output(TrainConfig(output_dir=str(tmp_path)), None, 0)
    assert not list(tokens.parent.iterdir())


def test_small_files_that_a_killed_process_did_not_finish_are_deleted(tmp_path: Path) -> None:
    unfinished = tmp_path / ".pipeloom-0123456789abcdef.tmp"
    unfinished.write_text('[{"rank": 0')
    prepare_output(TrainConfig(output_dir=str(tmp_path)), None, 5, goes_on=True)
    assert not unfinished.exists()


def test_a_resumed_run_keeps_its_metrics_up_to_the_checkpoint(tmp_path: Path) -> None:
    config = TrainConfig(output_dir=str(tmp_path))
    rows = [{"step": 1}, {"step": 2}, {"step": 2, "eval_loss": 1.0}, {"step": 3}]
    for row in rows:
        Journal(None, tmp_path).write(row)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "eval')
    assert prepare_output(config, tmp_path / "checkpoint-2", 2)[0] is None
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == rows[:3]


def test_lost_metrics_are_told(tmp_path: Path) -> None:
    config, path = TrainConfig(output_dir=str(tmp_path)), tmp_path / "metrics.jsonl"
    for content, lost in (
        ('{"step": 4}\n{"step": 5}\n{"step": 6, "l\n{"step": 7}\n{"step": 8}\n', "1 earlier step"),
        ('{"step": 4}\n\0\0\n{"step": 8}\n', "3 earlier steps"),
        ("", "7 earlier steps"),
    ):
        path.write_text(content)
        assert prepare_output(config, tmp_path / "checkpoint-8", 8)[0] == f"{path} has no rows of {lost}"
    path.unlink()
    assert prepare_output(config, tmp_path / "checkpoint-8", 8)[0] == f"{path} has no rows of 7 earlier steps"


@pytest.mark.parametrize(
    ("number", "advice"), [(errno.ENOSPC, "Free space, then"), (errno.EROFS, "Make the directory writable, then")]
)
def test_the_advice_fits_the_error(number: int, advice: str) -> None:
    with pytest.raises(RunError, match=f"a cannot be written: {os.strerror(number)}. {advice}"), writing(Path("a")):
        raise OSError(number, os.strerror(number), "a")


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(RunError, match=r"metrics.jsonl cannot be written: No space left on device") as error:
        Journal(None, tmp_path).write({"step": 1})
    assert "\n" not in str(error.value)


def test_rows_are_kept_while_the_disk_is_full(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "metrics.jsonl"
    journal = Journal(None, tmp_path, keeps_rows=True)
    journal.write({"step": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len('{"step": 1}\n') + 4, limits[1]))  # a part of a row fits
    try:
        journal.write({"step": 2})
        journal.write({"step": 3})
        journal.close()
        with pytest.raises(RunError, match=r"metrics.jsonl cannot be written: File too large"):
            journal.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert path.read_text() == '{"step": 1}\n'
    journal.write({"step": 4})
    assert path.read_text() == "".join(f'{{"step": {step}}}\n' for step in range(1, 5))
    told = (
        f"pipeloom: warning: {path} cannot be written: File too large. Training goes on, and rows are written later.\n"
    )
    assert capsys.readouterr().err == told


@pytest.mark.parametrize("name", ["config.yaml", "environment.json", "metrics.jsonl", "memory.json"])
def test_on_a_full_disk_the_files_of_a_run_stay_as_they_are(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Journal(None, tmp_path).write({"step": 1})
    config = TrainConfig(output_dir=str(tmp_path))
    prepare_output(config, tmp_path / "checkpoint-1", 1)
    write_memory(tmp_path, [])
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    replace_file = Path.replace

    def fail(path: Path, target: Path) -> Path:
        if target.name == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return replace_file(path, target)

    def write() -> None:
        with writing(tmp_path):
            prepare_output(replace(config, seed=1), tmp_path / "checkpoint-1", 1)
            write_memory(tmp_path, [MemoryRow(process=0, replica=0, rank=0, predicted={}, measured={})])

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(RunError, match=rf"{name} cannot be written: No space left on device. Free space"):
        write()
    assert (tmp_path / name).read_bytes() == before[name]
    assert {file.name for file in tmp_path.iterdir()} == set(before)


def test_a_run_that_goes_on_says_what_is_other() -> None:
    config = TrainConfig()
    place = Path("out/checkpoint-5")
    assert resume_notices(config, config.to_mapping(), place, 5, other_text=False) == []
    batch, data = replace(config.batch, size=16), replace(config.data, path="text")
    other = replace(config, batch=batch, data=data, seed=3, steps=5, output_dir="elsewhere")
    changed, text, steps = resume_notices(other, config.to_mapping(), place, 5, other_text=True)
    assert changed == f"different from {place}: data.path the default -> text, batch.size 32 -> 16, seed 0 -> 3"
    assert "the order of samples starts again" in text
    assert "nothing to train" in steps
    assert skipped_notice({"not UTF-8 text": 2, "empty": 1}) == ["3 files skipped: 2 not UTF-8 text, 1 empty"]
    assert skipped_notice({}) == []


def test_a_stream_that_goes_on_names_what_makes_gradients_late() -> None:
    parallel = ParallelConfig(replicas="2,1")
    config = TrainConfig(schedule="pipedream", weights="vertical", eval_steps=10, save_steps=20, parallel=parallel)
    flushed, place = TrainConfig(eval_steps=10), Path("c")
    [line] = resume_notices(config, flushed.to_mapping(), place, 5, other_text=False)
    assert line == (
        "different from c: parallel.replicas the default -> 2,1, schedule the default -> pipedream, "
        "weights the default -> vertical, save_steps 100 -> 20"
    )
    [back] = resume_notices(flushed, config.to_mapping(), place, 5, other_text=False)
    assert back.endswith("weights vertical -> the default, save_steps 20 -> 100")
    other = replace(flushed, schedule="gpipe", save_steps=1, parallel=replace(flushed.parallel, pipeline=4))
    assert resume_notices(other, flushed.to_mapping(), place, 5, other_text=False) == []


def test_a_batch_of_few_samples_has_as_few_microbatches() -> None:
    for size, wanted in ((1, 1), (5, 5), (32, 8)):
        assert TrainConfig(batch=BatchConfig(size=size)).num_microbatches == wanted
    assert TrainConfig(batch=BatchConfig(size=1, microbatches=4)).num_microbatches == 4


def test_unequal_slices_are_measured_and_predicted() -> None:
    model = GPT(GPTConfig(layers=2, width=8, heads=2, sequence_length=64))
    init_parameters(model, seed=0)
    schedule = schedules.build("seq1f1b", num_ranks=2, num_microbatches=2, num_slices=3)
    tokens = torch.zeros(4, 64, dtype=torch.long)
    with Pipeline(model, schedule, loss_fn=loss_fn, transport="loopback", slices=[40, 20, 4]) as pipe:
        pipe.step(tokens, tokens)
        cost = read_cost(cost_numbers(pipe, pipe.records, alone()), schedule, 1)
        took = {}
        for _, rows in pipe.records:
            for action, start, end in rows:
                took.setdefault((action.stage, action.op, action.slice), []).append(end - start)
        predictor = Predictor()
    for op, column in ((Op.F, 0), (Op.B, 1)):
        for stage in range(2):
            whole = sum(statistics.median(took[stage, op, piece]) for piece in range(3))
            assert float(cost.stage_seconds[stage, column]) == pytest.approx(whole)
    predictor.observe(cost)
    timeline = predictor.predict(lower(pipe.schedule))
    forward, backward = cost.slice_factors.tolist()
    for span in timeline.compute_spans[0]:
        op, piece = span.action.op, span.action.slice
        share = float(cost.stage_seconds[0, 0 if op is Op.F else 1]) / 3
        assert span.end - span.start == pytest.approx(share * (forward if op is Op.F else backward)[piece])


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_a_step_cost_comes_back_from_the_sum(ranks: int) -> None:
    model = GPT(GPTConfig(layers=3, width=8, heads=2, sequence_length=4))
    init_parameters(model, seed=0)
    schedule = schedules.one_f_one_b(num_ranks=ranks, num_microbatches=4)
    tokens = torch.zeros(4, 4, dtype=torch.long)
    with Pipeline(model, schedule, loss_fn=loss_fn, transport="loopback") as pipe:
        pipe.step(tokens, tokens)
        computed = [[row for row in rows if row[0].op in (Op.F, Op.B)] for _, rows in pipe.records]
        busy = [sum(end - start for _, start, end in rows) for rows in computed]
        longest = max(rows[-1][2] - rows[0][1] for rows in computed)
        cost = read_cost(cost_numbers(pipe, pipe.records, alone()), schedule, 1)
    assert cost.live_activations == [min(ranks - rank, 4) for rank in range(ranks)]
    assert cost.bubble_fraction == pytest.approx(1 - sum(busy) / ranks / longest)
    assert len(cost.peak_memory_bytes) == 1
    assert bool((cost.stage_seconds[:, :2] > 0).all())
    assert not cost.stage_seconds[:, 2:].any()


def test_the_prediction_is_the_simulation_of_median_times() -> None:
    schedule = schedules.one_f_one_b(num_ranks=2, num_microbatches=4)
    predictor = Predictor()
    for forward in (50.0, 1.0, 50.0, 1.0, 1.0):  # neither the first nor one slow step changes anything
        times = torch.tensor([[forward, 2.0, 0, 0], [1.0, 2.0, 0, 0]], dtype=torch.float64)
        cost = StepCost(bubble_fraction=0.0, peak_memory_bytes=[], live_activations=[], stage_seconds=times)
        predictor.observe(cost)
    expected = simulate(lower(schedule), Costs.uniform(forward=1.0, backward=2.0))
    assert predictor.predict(lower(schedule)).makespan == pytest.approx(expected.makespan)


def test_the_predicted_bubble_has_what_single_computations_took() -> None:
    """Medians of equal stages would leave the bubble of the start and the end; one slow forward holds up rank 1."""
    schedule = schedules.one_f_one_b(num_ranks=2, num_microbatches=4)
    program, slow = lower(schedule), Action(0, Op.F, 3)
    predictor = Predictor()
    times = torch.tensor([[1.0, 2.0, 0, 0]] * 2, dtype=torch.float64)
    predictor.observe(StepCost(bubble_fraction=0.0, peak_memory_bytes=[], live_activations=[], stage_seconds=times))
    even = predictor.predict(program)
    assert predictor.bubble_fraction(program) == pytest.approx(1 - 12 / 15)
    records = [
        (rank, [(span.action, span.start, span.end + 4 * (span.action == slow)) for span in row])
        for rank, row in enumerate(even.spans)
    ]
    predictor.observe_records(program, records)
    assert predictor.bubble_fraction(program) == pytest.approx(1 - (12 + 16) / 2 / 19)
    assert predictor.predict(program).makespan == pytest.approx(15)
    even_records = [
        (rank, [(span.action, span.start, span.end) for span in row]) for rank, row in enumerate(even.spans)
    ]
    predictor.observe_records(program, even_records)
    assert predictor.bubble_fraction(program) == pytest.approx((1 - 14 / 19 + 1 - 12 / 15) / 2)


@pytest.mark.parametrize("name", ["zb-h1", "zb-v", "dualpipe"])
def test_the_prediction_has_the_time_of_every_kind_of_backward(name: str) -> None:
    """What runs has B on some stages, I and W on some, and all three on others."""
    schedule = merge_backwards(schedules.build(name, num_ranks=4, num_microbatches=8))
    predictor = Predictor()
    ops = {(action.stage, action.op) for _, action in schedule.actions()}
    assert {op for _, op in ops} == {Op.F, Op.B, Op.I, Op.W}
    seconds = {Op.F: 1.0, Op.B: 2.5, Op.I: 1.0, Op.W: 2.0}  # I and W together take longer than B
    times = [[seconds[op] if (s, op) in ops else 0.0 for op in seconds] for s in range(schedule.num_stages)]
    cost = StepCost(
        bubble_fraction=0.0, peak_memory_bytes=[], live_activations=[], stage_seconds=torch.tensor(times).double()
    )
    predictor.observe(cost)
    predicted = predictor.predict(lower(schedule))
    found = [(span.action.op, span.end - span.start) for row in predicted.compute_spans for span in row]
    assert all(took == pytest.approx(seconds[op]) for op, took in found)


MESSAGES = [  # rank 1 waits for a forward, which comes 0.5 late; rank 0 comes late for a gradient
    (0, [(Action(0, Op.F, 0), 0, 1.0), (Action(0, Op.SEND_F, 0), 1, 1.25), (Action(0, Op.RECV_B, 0), 9, 9.125)]),
    (1, [(Action(1, Op.RECV_F, 0), 0, 1.75), (Action(1, Op.F, 0), 1.75, 2.0), (Action(1, Op.SEND_B, 0), 4, 4.25)]),
]


def test_messages_take_a_send_a_latency_and_a_receive() -> None:
    assert message_times(MESSAGES) == {"send": [0.25, 0.25], "arrival": [0.5], "receive": [0.125]}
    schedule = schedules.one_f_one_b(num_ranks=2, num_microbatches=1)
    predictor = Predictor()
    times = torch.tensor([[1.0, 2.0, 0, 0]] * 2, dtype=torch.float64)
    predictor.observe(StepCost(bubble_fraction=0.0, peak_memory_bytes=[], live_activations=[], stage_seconds=times))
    assert predictor.predict(lower(schedule)).makespan == pytest.approx(6)
    predictor.observe_records(lower(schedule), MESSAGES)
    assert predictor.predict(lower(schedule)).makespan == pytest.approx(6 + 2 * (0.25 + 0.5))


@pytest.mark.parametrize("prompt", ["def ", "", "ü" * 40])
def test_the_likeliest_text_is_that_of_the_uncut_model(prompt: str) -> None:
    model = GPT(GPTConfig(layers=2, width=16, heads=2, sequence_length=8))
    init_parameters(model, seed=3)
    ids = list(prompt.encode()) or [0]
    with torch.no_grad():
        for _ in range(12):
            ids.append(int(model(torch.tensor([ids[-8:]]))[0, -1].argmax()))
    sizes = ModelConfig(sequence_length=8)
    config = TrainConfig(model=sizes, sample_prompt=prompt, sample_tokens=12, sample_temperature=0.0, seed=0)
    text = generate(config, split(model, 2), Placement.loop(2), alone(), ByteTokenizer())
    assert text == ByteTokenizer().decode(ids)


def test_text_repeats_with_its_seed() -> None:
    model = GPT(GPTConfig(layers=2, width=16, heads=2, sequence_length=8))
    init_parameters(model, seed=3)

    def draw(seed: int) -> str:
        sizes = ModelConfig(sequence_length=8)
        config = TrainConfig(model=sizes, sample_prompt="x", sample_tokens=20, sample_temperature=1.0, seed=seed)
        return generate(config, split(model, 2), Placement.loop(2), alone(), ByteTokenizer())

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_times_measured_beside_collectives_come_out_of_the_simulation_again(strategy: str) -> None:
    """What they lost is taken from them before it is simulated."""
    data = DataAxis(degree=2, strategy=DataStrategy(strategy), granularity=Granularity.MICROBATCH)
    link = DataLink(bytes_per_second=4.0, sum_bytes_per_second=4.0, slowdown=1.0)
    known = DataCosts(parameter_bytes=(24.0,), gradient_bytes=(24.0,), units=(3,), link=link)  # a unit takes 1 s
    measured = Costs(forward=(9.0,), backward_input=(9.0,), backward_weight=(9.0,), backward=(18.0,))
    costs = known.by_itself(data, measured)
    assert costs.forward == ((7.0,) if strategy == "zero3" else (9.0,))
    assert costs.backward == ((14.0,) if strategy == "zero3" else (16.0,))
    schedule = schedules.build("gpipe", num_ranks=1, num_microbatches=1)
    costs = replace(costs, parameter_bytes=known.parameter_bytes, units=known.units)
    timeline = simulate(lower(schedule, data=data), costs, Network(**link.network()))
    forward, backward = (span.end - span.start for span in timeline.compute_spans[0])
    assert backward == pytest.approx(18.0)
    assert forward == pytest.approx(9.0 if strategy == "zero3" else 11.0)  # beside what is gathered once a step
    once = replace(data, granularity=Granularity.STEP)
    assert known.by_itself(once, measured) is measured


def test_processes_without_timed_collectives_slow_no_computations_down() -> None:
    idle = {"timed": [], "cores": 4, "threads": 2}
    busy = {"timed": [(Op.REDUCE_GRAD, 8, 1.0, 1.0), (Op.REDUCE_GRAD, 64, 2.0, 4.0)], "cores": 4, "threads": 2}
    assert slowdown_of_host([idle, idle]) == 0.0
    assert slowdown_of_host([idle, busy]) == 0.5  # its largest collective keeps two of the four cores busy
