"""Times and memory of transformers whose stages are shared: formulae, named models and devices, and the command."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pipeloom.cli import main
from pipeloom.errors import InputError
from pipeloom.ir.recompute import Recompute
from pipeloom.parallel.inside_stage import InsideStage
from pipeloom.parallel.traffic import sends
from pipeloom.plan.architecture import Architecture
from pipeloom.plan.costs.link_rate import LinkRate
from pipeloom.plan.costs.links import ring_link
from pipeloom.plan.costs.named_clusters import CLUSTERS
from pipeloom.plan.memory import gpt_layers, num_parameters, transformer_layers
from pipeloom.plan.named_architectures import NAMED, find_architecture, parse_architecture
from pipeloom.plan.stage_times import StageTimes, table_seconds
from tests.pure.test_import_rule import modules_after

H100 = CLUSTERS["dgx-h100"]
PLAIN = replace(H100.device, memory_bytes_per_second=1e30, multiprocessors=None, launch_seconds=0.0, host_seconds=0.0)
EXACT = replace(H100, efficiency=1.0, memory_efficiency=None, link_efficiency=None, device=PLAIN)


def times(inside: InsideStage | None = None, **changes) -> StageTimes:
    options = {"model": NAMED["gpt3-175b"], "inside": inside or InsideStage(), "cluster": EXACT, "samples": 8}
    return StageTimes(**{**options, "element": 2, **changes})


@pytest.mark.parametrize(("name", "billions"), [("gpt3-175b", 174.6), ("llama3-405b", 405.9)])
def test_named_models_have_the_parameters_of_their_papers(name, billions):
    assert num_parameters(transformer_layers(NAMED[name], 1, 2)) / 1e9 == pytest.approx(billions, abs=0.05)


@pytest.mark.parametrize(
    "inside",
    [
        InsideStage(tensor=8),
        InsideStage(tensor=16, layout="2d"),
        InsideStage(tensor=32, layout="2.5d", depth=2),
        InsideStage(tensor=64, layout="3d"),
        InsideStage(tensor=8, sequence=True, context=4),
    ],
)
def test_processes_of_a_stage_divide_its_parameters(inside):
    model = replace(NAMED["gpt3-175b"], biases=False, positions="rotary", vocabulary_size=50304)
    matrices = 12 * model.width**2 * model.layers + model.vocabulary_size * model.width
    vectors = (2 * model.layers + 1) * model.width
    held = num_parameters(transformer_layers(model, 64, 2, inside))
    share = inside.tensor // (inside.depth or 1)
    side = inside.grid.side if inside.grid else 1
    assert held == matrices // share + vectors // side


def test_a_forward_and_a_backward_take_six_operations_per_parameter():
    found = times()
    block = found.block()
    attention = 2 * found.tokens * 2048 * 12288 / 989e12
    matrices = 2 * found.tokens * 12 * 12288**2 / 989e12
    assert block == pytest.approx((matrices + attention, matrices + 2 * attention, matrices))
    whole = 96 * sum(block) + sum(found.head())
    assert found.operations() / 989e12 == pytest.approx(whole)
    again = times(recompute=Recompute.FULL).block()
    assert again.backward_input == pytest.approx(block.backward_input + block.forward)
    selective = times(recompute=Recompute.SELECTIVE).block()
    assert selective.backward_input == pytest.approx(block.backward_input + attention)


@pytest.mark.parametrize("sequence", [False, True])
def test_collectives_are_added_to_divided_arithmetic(sequence):
    alone, shared = times().block(), times(InsideStage(tensor=8, sequence=sequence)).block()
    size, link = 2 * 8 * 2048 * 12288, 450e9
    once = 2 * 7 / 8 * size / link + 14 * 3e-6  # an all-reduce
    assert shared.forward == pytest.approx(alone.forward / 8 + 2 * once)
    gathers = 2 * (7 / 8 * size / link + 7 * 3e-6) if sequence else 0.0
    assert shared.backward_input == pytest.approx(alone.backward_input / 8 + 2 * once + gathers)
    assert shared.backward_weight == pytest.approx(alone.backward_weight / 8)


def test_blocks_of_a_ring_travel_while_others_are_computed():
    slow = replace(EXACT, inside_node=replace(EXACT.inside_node, bytes_per_second=1e9))
    model = replace(NAMED["gpt3-175b"], sequence_length=65536)
    hidden, seen = (times(InsideStage(context=4), cluster=each, model=model).block() for each in (EXACT, slow))
    attention = 2 * 8 * 65536 * 65536 * 12288 / 4 / 989e12
    travel = 3 * (2 * 2 * 8 * 65536 // 4 * 12288 / 1e9 + 3e-6)
    assert hidden.forward == pytest.approx(times(model=model).block().forward / 4)
    assert seen.forward == pytest.approx(hidden.forward + travel - 0.75 * attention)


def test_links_are_shared_by_the_devices_of_a_node():
    def far(rate, flow=50e9):
        return LinkRate(bytes_per_second=rate, latency_seconds=1e-5, flow_bytes_per_second=flow)

    assert ring_link(EXACT, 1, 8) == LinkRate(bytes_per_second=450e9, latency_seconds=3e-6)
    assert ring_link(EXACT, 8, 4) == far(50e9)  # eight rings at once
    assert ring_link(EXACT, 2, 16) == far(200e9, 50e9 * 15 / 12)  # two, through four devices each; 12 of 15 are far
    assert ring_link(EXACT, 1, 16) == far(400e9, 50e9 * 15 / 8)
    near = replace(EXACT, between_nodes=replace(EXACT.between_nodes, bytes_per_second=8e12))
    assert ring_link(near, 1, 16).flow_bytes_per_second == 450e9 * 15 / 7  # those of the node take longer
    pairs = CLUSTERS["p3.16xlarge"]
    rates = [ring_link(pairs, 1, degree).bytes_per_second for degree in (2, 4, 8)]
    assert rates == [0.8 * 50e9, 0.8 * 150e9, 0.8 * 150e9]


@pytest.mark.parametrize(
    ("collective", "num_bytes", "messages"),
    [("all_reduce", 6.0, 6), ("all_gather", 12.0, 3), ("all_to_all", 3.0, 3), ("broadcast", 4.0, 1), ("shift", 4.0, 1)],
)
def test_a_collective_takes_its_bytes_and_messages(collective, num_bytes, messages):
    table = sends("tp", collective, 4, 4)
    assert table_seconds(table, {"tp": 4}, {"tp": LinkRate(bytes_per_second=2.0)}) == num_bytes / 2
    assert table_seconds(table, {"tp": 4}, {"tp": LinkRate(latency_seconds=1.0)}) == messages
    assert not sends("tp", collective, 1, 4)


def test_a_model_is_read_from_json(tmp_path):
    path = tmp_path / "small.json"
    path.write_text('{"layers": 4, "width": 64, "heads": 4, "vocabulary_size": 99, "sequence_length": 32}')
    found = find_architecture(str(path), "--model")
    assert (found.key_heads, found.mlp_width, found.norm, found.name) == (4, 256, "layer", "model")
    from pipeloom.models.gpt_config import GPTConfig

    sizes = GPTConfig(vocabulary_size=99, layers=4, width=64, heads=4, sequence_length=32, tie_embeddings=False)
    assert transformer_layers(found, 2, 4) == gpt_layers(sizes, 2, 4)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}", "the model file: missing keys 'layers', 'width', "),
        ('{"layers": 0}', "missing keys 'width', 'heads', "),
        (
            '{"layers": 1, "width": 6, "heads": 4, "vocabulary_size": 9, "sequence_length": 8}',
            "model heads=4: must divide width=6. Use 3.",
        ),
        (
            '{"layers": 1, "width": 6, "heads": 3, "vocabulary_size": 9, "sequence_length": 8, "norm": "batch"}',
            "norm='batch': must be layer or rms.",
        ),
    ],
)
def test_wrong_models_are_refused_in_one_line(text, words):
    with pytest.raises(InputError) as refused:
        parse_architecture(text)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def run(capsys, *words: str) -> tuple[int, str, str]:
    try:
        code = main(["simulate", *words])
    except SystemExit as end:
        code = int(end.code or 0)
    found = capsys.readouterr()
    return code, found.out, found.err


GPT3 = ("1f1b", "--ranks", "16", "--microbatches", "16", "--model", "gpt3-175b", "--tensor", "8")
LLAMA = ("interleaved", "--chunks", "8", "--ranks", "16", "--microbatches", "16", "--model", "llama3-405b")


@pytest.mark.parametrize(
    ("words", "devices"),
    [
        ((*GPT3, "--sequence-parallel", "--recompute", "selective", "--data", "8"), 1024),
        ((*GPT3, "--data", "8", "--context", "16", "--data-strategy", "zero1"), 16384),
        ((*LLAMA, "--tensor", "8", "--sequence-parallel", "--data", "128", "--data-strategy", "zero1"), 16384),
        ((*LLAMA, "--tensor", "8", "--data", "8", "--context", "16", "--sequence-length", "131072"), 16384),
        ((*LLAMA, "--tensor", "8", "--tensor-layout", "3d", "--microbatch-size", "4", "--device", "a100"), 128),
    ],
)
def test_large_models_are_simulated(capsys, words, devices):
    code, out, err = run(capsys, *words, "--json")
    assert (code, err) == (0, "")
    answer = json.loads(out)
    assert answer["devices"] == devices
    assert answer["step_seconds"] == answer["makespan_seconds"] + answer["update_seconds"]
    assert 0.005 < answer["peak_fraction"] < 0.65  # 128 tokens per process are few
    assert len(answer["memory"]) == 16
    assert all(rank["peak"] > 2**30 for rank in answer["memory"])


def test_a_published_run_of_llama_is_simulated_within_ten_percent(capsys):
    """arXiv:2407.21783, table 4: 16,384 devices, 8,192 tokens: 400 TFLOP/s per device."""
    more = ("--tensor", "8", "--sequence-parallel", "--data", "128", "--data-strategy", "zero1", "--json")
    _, out, _ = run(capsys, *LLAMA, *more)
    assert json.loads(out)["operations_per_device_second"] == pytest.approx(400e12, rel=0.1)


def test_the_table_of_a_model(capsys):
    code, out, _ = run(capsys, *GPT3)
    assert code == 0
    assert "gpt3-175b on 128 devices" in out
    assert "activations" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--tensor", "8"), "--tensor has no effect without --model"),
        (("--model", "gpt2"), "glam-64b, or a JSON file whose name ends in .json."),
        (("--model", "none.json"), "--model none.json: No such file"),
        (("--model", "gpt3-175b", "--forward", "1"), "--forward: does not work with --model"),
        (("--model", "gpt3-175b", "--tensor", "0"), "--tensor 0: must be at least 1."),
        (("--model", "gpt3-175b", "--tensor", "7"), "heads=96: must be a multiple of 7"),
        (("--model", "gpt3-175b", "--tensor", "5", "--tensor-layout", "2d"), "must be a square q * q. Use 4 or 9."),
        (("--model", "gpt3-175b", "--tensor", "4", "--tensor-layout", "2d"), "micro-batch size=1: must be a multiple"),
        (("--model", "gpt3-175b", "--context", "3"), "sequence length=2048: must be a multiple of 6"),
        (("--model", "gpt3-175b", "--efficiency", "1.5"), "--efficiency 1.5: must be above 0, at most 1."),
        (("--model", "gpt3-175b", "--cluster", "dgx"), "--cluster=dgx: must be p3.16xlarge, dgx-a100-80"),
        (("--model", "gpt3-175b", "--order", "pp,dp,pp"), "--order pp,dp,pp: must be different axes of dp, pp, cp, tp"),
        (("--model", "gpt3-175b", "--blocks", "48,47"), "--blocks 48,47: must be the blocks of 2 stages, 96 together."),
        (("--model", "gpt3-175b", "--ranks", "200"), "200 stages for 96 layers: must be at most 98."),
    ],
)
def test_wrong_options_are_refused_in_one_line(capsys, words, message):
    code, out, err = run(capsys, "1f1b", "--ranks", "2", "--microbatches", "2", *words)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1


def test_a_schedule_is_built_for_the_models_costs(capsys):
    words = ("--ranks", "4", "--microbatches", "6", "--model", "gpt3-175b", "--tensor", "8", "--json")
    plain = json.loads(run(capsys, "zb-h1", *words)[1])
    built = json.loads(run(capsys, "zb-auto", *words)[1])
    assert built["makespan_seconds"] <= plain["makespan_seconds"] * (1 + 1e-12)


def test_a_model_needs_no_torch(tmp_path):
    words = ["simulate", "1f1b", "--ranks", "2", "--microbatches", "4", "--model", "gpt3-175b", "--json"]
    assert "torch" not in modules_after(f"from pipeloom.cli import main\nassert main({words}) == 0", tmp_path)


def test_architectures_are_checked():
    with pytest.raises(InputError, match="model key_heads=3: must divide heads=4"):
        Architecture(
            name="a",
            layers=1,
            width=8,
            heads=4,
            key_heads=3,
            mlp_width=8,
            vocabulary_size=9,
            sequence_length=4,
        )
