"""Bytes, memory and times of mixtures of experts in closed form, and `simulate --model` with experts."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pipeloom import schedules as families
from pipeloom.cli import main
from pipeloom.errors import InputError
from pipeloom.ir import DataAxis, DataStrategy
from pipeloom.parallel.expert.sizes import ExpertSizes
from pipeloom.parallel.expert.traffic import Rows, balanced_rows, dispatch_traffic, rows_of
from pipeloom.parallel.inside_stage import InsideStage
from pipeloom.passes import lower
from pipeloom.plan.costs.links import ring_link
from pipeloom.plan.costs.named_clusters import CLUSTERS
from pipeloom.plan.memory import LayerMemory, MemoryModel, memory_of_ranks, num_parameters, transformer_layers
from pipeloom.plan.memory.choose import stage_bytes
from pipeloom.plan.named_architectures import NAMED, parse_architecture
from pipeloom.plan.stage_times import StageTimes

MIXTRAL, GLAM, H100 = NAMED["mixtral-8x7b"], NAMED["glam-64b"], CLUSTERS["dgx-h100"]
EIGHT = ExpertSizes(experts=8, top_k=2, expert_width=64)


def answer_of(capsys, *words: str) -> dict:
    assert main(["simulate", "1f1b", "--microbatches", "8", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("name", "whole", "active"), [("mixtral-8x7b", 46.7e9, 12.9e9), ("glam-64b", 1.16e12, 96.6e9)])
def test_mixtures_have_the_parameters_of_their_papers(capsys, name, whole, active):
    found = answer_of(capsys, "--ranks", "2", "--model", name, "--sequence-length", "512")
    assert found["parameters"] == num_parameters(transformer_layers(NAMED[name], 1, 2))
    assert found["parameters"] == pytest.approx(whole, rel=0.002)
    assert found["active_parameters"] == pytest.approx(active, rel=0.002)


@pytest.mark.parametrize("inside", [InsideStage(expert=4), InsideStage(expert=2, tensor=4), InsideStage(tensor=8)])
def test_processes_divide_the_parameters_of_experts(inside):
    whole, held = (transformer_layers(MIXTRAL, 1, 2, each) for each in (InsideStage(), inside))
    for layers in zip(whole[1:-2], held[1:-2], strict=True):
        one, part = (sum(layer.parameter_sizes[name] for name in layer.expert_parameters) for layer in layers)
        assert (one, part) == (8 * 3 * 4096 * 14336, one // (inside.expert * inside.tensor))
        assert layers[1].parameters["blocks.0.experts.router.weight".replace("0", layers[1].name[7:])] == (8, 4096)


def test_every_other_block_of_glam_has_experts():
    layers = transformer_layers(GLAM, 1, 2)[1:-2]
    assert [bool(layer.expert_parameters) for layer in layers] == [False, True] * 32
    assert layers[0].parameters["blocks.0.attention_out.weight"] == (8192, 16384)


def test_rows_are_those_that_leave_and_come():
    counts = [[3, 0, 2, 1], [0, 4, 0, 2]]  # of two processes to four experts, two on each
    assert rows_of(counts, 0) == Rows(own=6, sent=3, received=4)
    assert rows_of(counts, 1) == Rows(own=6, sent=4, received=3)
    assert balanced_rows(EIGHT, 16, 4) == Rows(32, 24, 24)
    assert balanced_rows(EIGHT, 16, 4, imbalance=1.5) == Rows(32, 24, 36)
    assert balanced_rows(replace(EIGHT, capacity_factor=0.5), 16, 4) == Rows(16, 12, 12)
    chosen = ExpertSizes(experts=8, top_k=1.5, expert_width=64, capacity_factor=1.0, router="expert-choice")
    assert balanced_rows(chosen, 16, 4) == Rows(24, 18, 18)


def test_dispatch_sends_rows_there_and_back():
    sizes = {"samples": 2, "tokens": 16, "width": 8, "element": 4}
    found = dispatch_traffic(EIGHT, 4, **sizes, rows=Rows(9, 5, 7))
    key = ("ep", "all_to_all")
    assert found.forward[key] == (3, 8 * 8 * 3 // 4 + 12 * 32)
    assert found.backward[key] == (2, 12 * 32)
    padded = dispatch_traffic(replace(EIGHT, capacity_factor=1.25), 4, **sizes, exchange="capacity")
    assert padded.forward == padded.backward == {key: (2, 2 * 8 * 5 * 32 * 3 // 4)}  # 5 slots: 2 * 16 / 8 * 1.25
    assert dispatch_traffic(EIGHT, 1, **sizes) == ({}, {})


def states(strategy: DataStrategy, expert: int, replica: int = 0) -> dict[str, float]:
    """Bytes per element of a layer that has only experts, on 4 replicas."""
    layer = LayerMemory(
        name="blocks.0",
        parameters={"w": (1024 // expert, 1024)},
        kept_bytes={},
        is_block=True,
        recompute_share={},
        expert_parameters=frozenset("w"),
    )
    layer = replace(layer, kept_bytes=dict.fromkeys(("none", "selective", "full"), 0.0))
    program = lower(families.build("1f1b", num_ranks=1, num_microbatches=2), data=DataAxis(degree=4, strategy=strategy))
    model = MemoryModel(stages=[[layer]], expert=expert)
    memory = memory_of_ranks(program, model, replica=replica)[0]
    return {kind: size * expert / 2**20 for kind, size in memory.kinds.items() if size}


def test_only_expert_data_replicas_share_the_states_of_experts():
    for expert in (1, 2, 4):
        few = 4 // expert
        assert states(DataStrategy.ZERO1, expert)["optimizer"] == 8 / few
        kind = "masters" if few > 1 else "parameters"  # experts without other replicas are not sharded
        assert states(DataStrategy.ZERO3, expert)[kind] == 4 / few
        assert states(DataStrategy.DDP, expert)["optimizer"] == 8
    for replica in range(4):  # the first of each two that share experts
        assert ("optimizer" in states(DataStrategy.PARAMETER_SERVER, 2, replica)) == (replica < 2)


def test_gradients_of_experts_travel_between_fewer_replicas():
    model = MemoryModel(stages=[transformer_layers(GLAM, 1, 2, InsideStage(expert=4))[1:3]], expert=4)
    apart = 64 * 2 * 8192 * 32768 // 4
    others = num_parameters(model.stages[0]) - apart
    for replicas, share in ((4, 0.0), (8, 1 / 2 / (7 / 8))):
        assert stage_bytes(model, replicas)[0][0] == pytest.approx(4 * (others + share * apart))


def times(**changes) -> StageTimes:
    changes_of_device = {"memory_bytes_per_second": 1e30, "multiprocessors": None, "launch_seconds": 0.0}
    device = replace(H100.device, host_seconds=0.0, **changes_of_device)
    exact = replace(H100, efficiency=1.0, memory_efficiency=None, link_efficiency=None, device=device)
    model = replace(GLAM, sequence_length=2048)
    options = {"model": model, "inside": InsideStage(), "cluster": exact, "samples": 4, "element": 2}
    return StageTimes(**{**options, **changes})


def test_experts_of_a_token_take_time_and_the_busiest_process_most():
    even, uneven = times(), times(imbalance=1.5)
    one = 2 * 8192 * 2 * 8192 * 32768 / 989e12  # an expert, all tokens
    assert uneven.block(experts=True).forward - even.block(experts=True).forward == pytest.approx(0.5 * 2 * one)
    assert even.block().forward == uneven.block().forward
    router = 2 * 8192 * 8192 * 64 / 989e12
    assert even.block(experts=True).forward - even.block().forward == pytest.approx((2 - 3 / 2) * one + router)
    assert sum(each.forward for each in even.stages([31, 33])) == pytest.approx(
        32 * (even.block(experts=True).forward + even.block().forward) + even.head().forward
    )


def test_all_to_alls_take_the_link_of_neighbouring_replicas():
    near, far = (times(inside=InsideStage(expert=4), degrees={"pp": ranks}) for ranks in (2, 4))
    assert near.links["ep"] == ring_link(near.cluster, 2, 4)
    assert far.links["ep"] == ring_link(far.cluster, 4, 4)
    assert far.links["ep"].flow_bytes_per_second == 50e9 * 3 / 2  # two of three others are in another node
    inside = InsideStage(expert=8, context=8, expert_axes=("cp",))
    assert times(inside=inside, degrees={"pp": 8}).links["ep"] == near.links["ep"]
    rows = 2 * 8192 * 3 / 4 * 8192 * 2
    alone = times().block(experts=True)
    counts = 8 * 64 * 3 / 4
    assert near.block(experts=True).forward - alone.forward == pytest.approx((2 * rows + counts) / 450e9 + 9 * 3e-6)
    assert near.block(experts=True).backward_input - alone.backward_input == pytest.approx(2 * rows / 450e9 + 6 * 3e-6)


def test_a_mixture_is_simulated(capsys):
    words = ("--ranks", "2", "--data", "8", "--model", "mixtral-8x7b", "--sequence-length", "4096")
    alone, shared, uneven = (
        answer_of(capsys, *words, *more)
        for more in ((), ("--expert", "8"), ("--expert", "8", "--expert-imbalance", "1.2"))
    )
    assert alone["expert_collective_seconds"]["forward"] == 0 < shared["expert_collective_seconds"]["forward"]
    assert alone["memory"][0]["parameters"] > 4 * shared["memory"][0]["parameters"]
    assert uneven["makespan_seconds"] > 1.05 * shared["makespan_seconds"]
    assert uneven["memory"][0]["activations"] > 1.05 * shared["memory"][0]["activations"]


SMALL = '"layers": 2, "width": 64, "heads": 4, "vocabulary_size": 99, "sequence_length": 32'


def test_a_mixture_is_read_from_json():
    found = parse_architecture(f'{{{SMALL}, "experts": 8, "top_k": 2, "expert_width": 32, "experts_every": 2}}')
    assert found.experts == ExpertSizes(experts=8, top_k=2, expert_width=32)
    assert [found.has_experts(block) for block in range(2)] == [False, True]
    for more, rule in (
        ('"top_k": 2', "top_k=2: has no effect without experts. Add experts, or remove it."),
        ('"experts": 8', "experts=8: needs top_k, the experts per token. Add it."),
        ('"experts": 2, "top_k": 3', "model top_k=3: must be above 0 and at most experts=2."),
    ):
        with pytest.raises(InputError) as refused:
            parse_architecture(f"{{{SMALL}, {more}}}")
        assert rule in str(refused.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("gpt3-175b", "--data", "2", "--expert", "2"), "--expert: gpt3-175b has no experts."),
        (("mixtral-8x7b", "--expert", "2"), "--expert 2: must divide the number of processes along data, 1."),
        (("mixtral-8x7b", "--data", "3", "--expert", "3"), "expert=3: must divide the 8 experts. Use 1, 2, 4 or 8."),
        (("mixtral-8x7b", "--expert-imbalance", "2"), "--expert-imbalance: has no effect without --expert."),
        (
            ("mixtral-8x7b", "--data", "2", "--expert", "2", "--expert-imbalance", "2.5"),
            "--expert-imbalance 2.5: must be at most --expert 2",
        ),
        (
            ("mixtral-8x7b", "--data", "2", "--expert", "2", "--expert-imbalance", "0.5"),
            "--expert-imbalance 0.5: must be at least 1",
        ),
        (
            ("mixtral-8x7b", "--data", "2", "--expert", "2", "--expert-exchange", "capacity"),
            "mixtral-8x7b has no capacity_factor",
        ),
        (
            ("mixtral-8x7b", "--tensor", "4", "--tensor-layout", "2d", "--microbatch-size", "2"),
            "layout=2d: experts work with layout 1d alone.",
        ),
    ],
)
def test_wrong_options_of_experts_are_refused_in_one_line(capsys, words, message):
    code = main(["simulate", "1f1b", "--ranks", "2", "--microbatches", "2", "--model", *words])
    found = capsys.readouterr()
    assert (code, found.out) == (2, "")
    assert message in found.err
    assert len(found.err.splitlines()) == 1
