"""Measured layers on processes that share each stage: `pipeloom partition` and `pipeloom slice` with their options."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeloom.cli import main
from pipeloom.cli.train import parse
from pipeloom.errors import InputError
from pipeloom.parallel.inside_stage import InsideStage
from pipeloom.plan.architecture import Architecture
from pipeloom.plan.partition import Profile
from pipeloom.plan.partition.shared_profile import samples_of, share_profile
from pipeloom.plan.plan import Plan
from pipeloom.plan.shared_layers import NO_LIMIT, SharedLayers
from pipeloom.plan.slicing import LinearTime, SliceCosts
from pipeloom.plan.slicing.shared_costs import share_costs
from pipeloom.train.config.rules.settings import validate_settings

SAMPLES, S, W, V = 4, 64, 32, 256
MODEL = Architecture(
    name="gpt", layers=3, width=W, heads=4, key_heads=4, mlp_width=4 * W, vocabulary_size=V, sequence_length=S
)
SIZES = ["--model.layers=3", f"--model.width={W}", "--model.heads=4", f"--model.sequence_length={S}"]
STREAM = 4 * SAMPLES * S * W  # bytes between blocks
BLOCK = 4 * (12 * W * W + 2 * W)
RATE = 1e6


def profile(*, tied: bool = False) -> Profile:
    blocks = [(f"blocks.{index}", 0.9, 1.8, STREAM, BLOCK) for index in range(3)]
    ends = ("norm", 0.02, 0.04, STREAM, 4 * W), ("head", 0.3, 0.6, STREAM * V // W, 4 * V * W)
    ties = [(4.0 * V * W, (0, 5))] if tied else []
    return Profile.of([("embedding", 0.01, 0.02, STREAM, 4 * V * W), *blocks, *ends], ties)


def shared(inside: InsideStage, rate: float = NO_LIMIT, model: Architecture = MODEL) -> Profile:
    layers = SharedLayers(model=model, inside=inside, bytes_per_second=rate, samples=SAMPLES)
    layers.check()
    return share_profile(profile(tied=True), layers)


LAYOUTS = {
    "1d": InsideStage(tensor=4),
    "sequence": InsideStage(tensor=4, sequence=True),
    "2d": InsideStage(tensor=4, layout="2d"),
    "2.5d": InsideStage(tensor=4, layout="2.5d", depth=1),
    "ring": InsideStage(context=4),
    "ulysses": InsideStage(context=4, context_kind="ulysses"),
    "both": InsideStage(tensor=2, context=2),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_without_cost_of_collectives_times_and_sizes_are_divided(name: str) -> None:
    inside = LAYOUTS[name]
    found = shared(inside)
    between = inside.context * (inside.tensor if inside.sequence or inside.grid else 1)
    for layer, whole in zip(found.layers, profile().layers, strict=True):
        part = between if layer.name in ("embedding", "norm") else 4
        assert layer.forward_seconds == pytest.approx(whole.forward_seconds / part)
        assert layer.backward_seconds == pytest.approx(whole.backward_seconds / part)
        assert layer.activation_bytes == whole.activation_bytes / (4 if layer.name == "head" else between)
    block, head = found.layers[1], found.layers[-1]
    gains = 2 * W if inside.grid is None else 2 * W / inside.grid.side
    assert block.parameter_bytes == pytest.approx(4 * (12 * W * W / inside.tensor + gains))
    assert head.parameter_bytes == 4 * V * W / inside.tensor == found.ties[0].size


def test_collectives_of_each_layer_are_added() -> None:
    free, found = shared(LAYOUTS["1d"]), shared(LAYOUTS["1d"], RATE)
    more = [
        (b.forward_seconds - a.forward_seconds, b.backward_seconds - a.backward_seconds)
        for a, b in zip(free.layers, found.layers, strict=True)
    ]
    sums = 2 * 2 * STREAM * 3 / 4 / RATE  # two all-reduces on 4 processes
    for block in more[1:4]:
        assert block == pytest.approx((sums, sums))
    assert more[0] == pytest.approx((sums / 2, 0.0))  # of the embedding
    assert more[4] == pytest.approx((0.0, 0.0))  # every process has the norm
    assert more[5][1] == pytest.approx(sums / 2)  # of the head's input gradient


def test_hidden_collectives_take_no_time() -> None:
    """A ring sends keys and values of (n - 1) hops, each while the hop before it is computed."""
    ring, free = LAYOUTS["ring"], shared(LAYOUTS["ring"]).layers[1]
    slow, fast = shared(ring, RATE / 100).layers[1], shared(ring, RATE).layers[1]
    sent = 3 * 2 * STREAM / 4
    attention = 0.9 * S * W / (S * W + 12 * W * W) / 4 / 4  # of one hop on one process
    assert fast.forward_seconds - free.forward_seconds == pytest.approx(max(0.0, sent / RATE - 3 * attention))
    assert slow.forward_seconds - free.forward_seconds == pytest.approx(100 * sent / RATE - 3 * attention)


def test_what_processes_compute_twice_is_counted() -> None:
    few = replace(MODEL, key_heads=2)
    matrices = W * (W + 2 * W // 2 + W + 8 * W)
    share = (2 * matrices + 2 * W * W + 2 * S * W) / (2 * matrices + 2 * S * W)  # key heads: each on two processes
    found = shared(InsideStage(tensor=4), model=few).layers[1]
    assert found.forward_seconds == pytest.approx(0.9 / 4 * share)
    plain = shared(InsideStage(context=4, context_kind="ring-plain")).layers[1]
    assert plain.forward_seconds == pytest.approx(0.9 / 4 * (S * 7 / 4 + 12 * W) / (S + 12 * W))


def test_costs_of_slices_are_divided_and_collectives_added() -> None:
    time = LinearTime(base=((8.0, 0.2), (64.0, 0.8)), context=(0.1, 0.2, 0.3, 0.4))
    costs = SliceCosts(forward=time, backward=time, latency=0.01, seconds_per_token_sent=W * 4 / RATE)
    for sequence in (False, True):
        inside = InsideStage(tensor=2, sequence=sequence)
        layers = SharedLayers(model=MODEL, inside=inside, bytes_per_second=RATE, latency_seconds=0.01)
        found = share_costs(costs, layers, blocks=2)
        assert found.forward.context == pytest.approx((0.05, 0.1, 0.15, 0.2))
        assert found.seconds_per_token_sent == costs.seconds_per_token_sent / (2 if sequence else 1)
        latency = 2 * 2 * 2 * 0.01  # two blocks with two sums, each of two messages in turn
        for (tokens, seconds), (_, before) in zip(found.forward.base, time.base, strict=True):
            assert seconds == pytest.approx(before / 2 + latency + 2 * 2 * tokens * W * 4 / RATE)
        gathers = 2 * (2 * 0.01 + 2 * 8 * W * 4 / 2 / RATE) if sequence else 0.0  # inputs of column layers, again
        assert found.backward.base[0][1] == pytest.approx(found.forward.base[0][1] + gathers)


# The commands


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "profile.json"
    path.write_text(profile().to_json())
    return str(path)


def run(capsys: Any, *words: str) -> tuple[int, str, str]:
    code = main([*words])
    captured = capsys.readouterr()
    assert len(captured.err.splitlines()) == (code != 0)
    return code, captured.out, captured.err


TENSOR = ["--tensor", "2", "--sequence-parallel"]


def test_a_stream_of_stages_that_processes_share(capsys: Any, file: str, tmp_path: Path) -> None:
    words = ["partition", "--profile", file, "--ranks", "3", "--bandwidth", str(RATE), *SIZES]
    path = tmp_path / "plan.json"
    answer = json.loads(run(capsys, *words, *TENSOR, "--json", "--out", str(path))[1])
    assert answer["devices"] == 6
    plan = Plan.load(path)
    assert (plan.tensor, plan.sequence, plan.context, plan.num_processes) == (2, True, 1, 6)
    alone = json.loads(run(capsys, *words[:-4], "--json")[1])
    assert "devices" not in alone
    assert alone["period_seconds"] / 2 < answer["period_seconds"] < alone["period_seconds"]
    free = json.loads(run(capsys, *words, *TENSOR, "--node-bandwidth", "1e20", "--json")[1])
    assert free["period_seconds"] < answer["period_seconds"]
    first, *_, train = run(capsys, *words, *TENSOR)[1].splitlines()
    assert "on 3 ranks of 2 processes" in first
    assert "--parallel.tensor 2 " in train
    assert "--parallel.sequence true" in train
    config = parse(train.partition("pipeloom train ")[2].split())
    validate_settings(config)
    assert (config.num_processes, config.model.width, config.batch.size) == (6, W, SAMPLES)


def test_a_synchronous_partition_with_every_layout(capsys: Any, file: str, tmp_path: Path) -> None:
    words = ["partition", "--profile", file, "--ranks", "2", "--bandwidth", "1e9", *SIZES]
    words += ["--schedule", "dapple", "--microbatches", "8"]
    for layout in (
        [*TENSOR, "--context", "2", "--context-kind", "ulysses"],
        ["--tensor", "4", "--tensor-layout", "2d"],
        ["--tensor", "4", "--tensor-layout", "2.5d", "--tensor-depth", "1"],
        ["--context", "2"],
    ):
        path = tmp_path / "plan.json"
        lines = run(capsys, *words, *layout, "--out", str(path))[1].splitlines()
        plan = Plan.load(path)
        inside = InsideStage(
            tensor=plan.tensor,
            layout=plan.tensor_layout or "1d",
            depth=plan.tensor_depth,
            sequence=plan.sequence,
            context=plan.context,
            context_kind=plan.context_kind or "ring",
        )
        assert plan.num_processes == 2 * inside.processes
        assert any("the profile is of one process; computation is divided, and collectives at" in x for x in lines)
        validate_settings(parse(lines[-1].partition("pipeloom train ")[2].split()))
        written = run(capsys, *words, *layout)[1].splitlines()[-1]
        validate_settings(parse(written.partition("pipeloom train ")[2].split()))
        assert f"--parallel.{'tensor' if plan.tensor > 1 else 'context'} " in written


def test_gradients_are_summed_along_context_too(capsys: Any, file: str) -> None:
    words = ["partition", "--profile", file, "--ranks", "1", "--bandwidth", "1e4", *SIZES, "--context", "4", "--json"]
    words += ["--schedule", "dapple", "--microbatches", "2", "--node-bandwidth", "1e20"]
    answer = json.loads(run(capsys, *words)[1])
    whole = sum(layer.parameter_bytes for layer in profile().layers)
    layers = shared(InsideStage(context=4)).layers
    seconds = sum(layer.forward_seconds + layer.backward_seconds for layer in layers)
    assert answer["step_seconds"] == pytest.approx(2 * seconds + 2 * 3 / 4 * whole / 1e4)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tensor", "3"], "heads=4: must be a multiple of 3"),
        (["--tensor", "0"], "--tensor 0: must be at least 1"),
        (["--tensor-layout", "2d"], "--tensor-layout: has no effect without --tensor"),
        (["--tensor", "4", "--tensor-layout", "2.5d"], "--tensor-layout 2.5d: .* Add --tensor-depth"),
        (["--context", "2"], "--context 2: does not work with --schedule pipedream"),
        (["--node-bandwidth", "1e9"], "--node-bandwidth: has no effect without --tensor or --context"),
        (["--tensor", "2", "--model.width", "24"], "--model.width=24: outputs of blocks have 6,144 bytes per sequence"),
        (["--tensor", "2", "--model.layers", "4"], "--model.layers=4: the profile has 3 blocks. Add --model.layers 3"),
        (["--batch", "2", "--tensor", "2"], "--batch: does not work with --profile"),
    ],
)
def test_a_partition_that_does_not_fit_is_refused_in_one_line(
    capsys: Any, file: str, words: list[str], said: str
) -> None:
    sizes = SIZES if "--tensor" in words else []
    code, _, err = run(capsys, "partition", "--profile", file, "--ranks", "2", "--bandwidth", "1e9", *sizes, *words)
    assert code == 2
    assert re.search(said, err), err


def test_a_profile_of_another_model_is_refused() -> None:
    other = Profile.of([("a", 1.0, 2.0, 10.0, 10.0)])
    with pytest.raises(InputError, match="the profile has other layers than embedding, blocks"):
        samples_of(other, MODEL)
    assert samples_of(profile(), MODEL) == SAMPLES


COSTS = {
    "forward": {"base": [[8, 0.006], [128, 0.006], [2048, 0.08]], "context": [0, 0, 1e-7, 1e-8]},
    "backward": {"base": [[8, 0.012], [128, 0.012], [2048, 0.16]], "context": [0, 0, 2e-7, 2e-8]},
    "latency": 0.0002,
    "seconds_per_token_sent": 1e-6,
}


def test_slices_of_sequences_on_tensor_parallel_ranks(capsys: Any, tmp_path: Path) -> None:
    costs, path = tmp_path / "costs.json", tmp_path / "plan.json"
    costs.write_text(json.dumps(COSTS))
    words = ["slice", "--sequence", "2048", "--ranks", "2", "--batch", "1", "--grid", "64", "--costs", str(costs)]
    alone = json.loads(run(capsys, *words, "--json")[1])
    more = ["--model.layers", "2", "--model.width", "256", "--model.heads", "4"]
    found = json.loads(run(capsys, *words, *more, *TENSOR, "--json", "--out", str(path))[1])
    assert found["devices"] == 4
    assert alone["predicted_seconds"] / 2 < found["predicted_seconds"] < alone["predicted_seconds"]
    free = json.loads(run(capsys, *words, *more, *TENSOR, "--node-bandwidth", "1e20", "--json")[1])
    assert free["predicted_seconds"] < found["predicted_seconds"]
    plan = Plan.load(path)
    assert (plan.tensor, plan.sequence, plan.num_processes) == (2, True, 4)
    lines = run(capsys, *words, *more, *TENSOR, "--out", str(path))[1].splitlines()
    assert lines[-2].startswith("tensor 2 (1d with sequence parallelism): the times are of one process; computation is")
    validate_settings(parse(lines[-1].partition("pipeloom train ")[2].split()))
    for wrong, said in (
        (["--context", "2"], "--context 2: does not work with slices, which cut the sequence too. Remove --context"),
        (["--tensor", "4", "--tensor-layout", "2d"], "--tensor-layout 2d: cuts the samples of micro-batches"),
        (["--tensor", "3", "--sequence-parallel"], "--grid 64: must be a multiple of --tensor 3"),
        (["--tensor", "8"], "heads=4: must be a multiple of 8"),
        (["--sequence-parallel"], "--sequence-parallel: has no effect without --tensor"),
        (["--node-bandwidth", "1e9"], "--node-bandwidth: has no effect without --tensor"),
    ):
        code, _, err = run(capsys, *words, *(more if "--tensor" in wrong else []), *wrong)
        assert code == 2
        assert said in err
