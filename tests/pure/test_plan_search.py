"""`pipeloom plan`: the search finds what simulating everything finds, and its plans fit and run."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import product
from math import inf

import pytest

from pipeloom.cli import main
from pipeloom.errors import InputError, ScheduleError
from pipeloom.ir import Placement
from pipeloom.ir.recompute import Recompute
from pipeloom.parallel.expert.sizes import ExpertSizes
from pipeloom.parallel.inside_stage import InsideStage
from pipeloom.plan.costs.configuration import Configuration
from pipeloom.plan.costs.step_costs import StepCosts
from pipeloom.plan.huggingface_config import architecture_of
from pipeloom.plan.named_architectures import NAMED
from pipeloom.plan.plan import Plan
from pipeloom.plan.search.answer import seconds_of
from pipeloom.plan.search.best_first import Answer, find_plans
from pipeloom.plan.search.comparison import plain_of, usual_plan, with_plain
from pipeloom.plan.search.memory.knapsack import knapsack
from pipeloom.plan.search.request import PYTHON, Refusals, Request, parse_fixed
from pipeloom.plan.search.simulated import Steps, simulated
from pipeloom.plan.search.space.balance import balanced_blocks
from pipeloom.plan.search.space.bounds import mixed_seconds
from pipeloom.plan.search.space.shapes import Shapes, shape_of
from pipeloom.plan.search.tree.best_plans import BestPlans
from pipeloom.plan.search.tree.tree_search import TreeSearch
from pipeloom.plan.search.words import against, cells_of, counts_of, lines_of, usual_text
from pipeloom.schedules import find
from pipeloom.train.config.planned import planned_config
from pipeloom.train.config.train_config import TrainConfig
from tests.pure.published_runs import cost_model, gpt

GIB = 2.0**30
MODELS = (gpt(8, 1024, 16, sequence=512, vocabulary=32000), gpt(12, 2048, 16), gpt(16, 1536, 12, vocabulary=50304))


def search(
    model=MODELS[0], devices=8, batch=16, memory=80 * GIB, *, cluster="dgx-a100-80", exhaustive=False, fixed="", **more
) -> Answer:
    software = more.pop("software", "pipeloom")
    request = Request(
        devices=devices, batch_size=batch, memory_bytes=memory, fixed=parse_fixed(fixed) if fixed else {}, **more
    )
    return find_plans(cost_model(model, cluster, software), request, exhaustive=exhaustive)


def compare(model, devices, batch, memory, fixed):
    best = search(model, devices, batch, memory, fixed=fixed, top=1)
    every = search(model, devices, batch, memory, fixed=fixed, top=1, exhaustive=True)
    assert best.plans[0].step_seconds <= 1.01 * every.plans[0].step_seconds
    assert best.plans[0].peak <= memory
    assert best.simulated <= every.simulated


@pytest.mark.parametrize(
    ("model", "batch", "memory", "fixed"),
    [
        (MODELS[0], 16, 80 * GIB, "context=1,slices=1,microbatch_size=2,pipeline=4,data_strategy=zero1"),
        (MODELS[0], 8, 2 * GIB, "context=1,slices=1,tensor=2,sequence=true,microbatch_size=1,pipeline=2"),
        (MODELS[1], 32, 9 * GIB, "context=1,slices=1,tensor=1,sequence=false,data=2,schedule=1f1b"),
    ],
)
def test_as_good_as_simulating_everything(model, batch, memory, fixed):
    compare(model, 8, batch, memory, fixed)


@pytest.mark.whole_grid
@pytest.mark.parametrize(
    ("model", "devices", "batch", "memory"), list(product(MODELS, (8, 16), (16, 64, 128), (12 * GIB, 80 * GIB)))
)
def test_small_clusters(model, devices, batch, memory):
    compare(model, devices, batch, memory, "")


@pytest.mark.parametrize("pipeline", [1, pytest.param(2, marks=pytest.mark.whole_grid), 8])
def test_the_best_plan_is_found_where_memory_is_short(pipeline):
    """Where memory is short, plans that offload look better than they are, and are looked at first."""
    model = gpt(32, 4096, 32, sequence=8192, vocabulary=128256)
    case = {"model": model, "devices": 64, "batch": 256, "cluster": "dgx-h100", "top": 1}
    best = search(**case)
    found = search(**case, fixed=f"pipeline={pipeline}", forbidden=frozenset({"offload", "offload_states", "slices"}))
    assert best.plans[0].step_seconds <= 1.005 * found.plans[0].step_seconds


@pytest.mark.whole_grid
def test_the_best_plan_is_found_where_context_parallelism_multiplies_the_space():
    model = gpt(80, 8192, 64, sequence=8192, vocabulary=128256)
    case = {"model": model, "devices": 32, "batch": 128, "memory": 73.6 * GIB, "cluster": "dgx-h100", "top": 1}
    best, found = search(**case), search(**case, fixed="context=1,slices=1,pipeline=2,tensor=2")
    assert best.plans[0].step_seconds <= 1.03 * found.plans[0].step_seconds


def test_the_memory_that_a_plan_needs_is_enough():
    with pytest.raises(InputError, match="the smallest one found needs ") as told:
        search(memory=0.1 * GIB, fixed="context=1,slices=1")
    words = str(told.value)
    needed, unit = re.search(r"needs ([\d.]+) (\w+), ", words).groups()
    least = float(needed) * {"MiB": 2.0**20, "GiB": GIB}[unit]
    assert search(memory=1.001 * least, fixed="context=1,slices=1", top=1).plans


def test_layouts_of_gpt_xl_in_order():
    """GPT-XL on 64 V100: of the layouts that were measured, the fastest one is first."""
    model = gpt(24, 2048, 16, vocabulary=50304)
    fixed = "data=8,microbatch_size=1,recompute=full,schedule=1f1b,context=1,sequence=false,data_strategy=ddp"
    best = search(model, 64, 1024, 16 * GIB, cluster="p3.16xlarge", fixed=fixed, top=4).plans
    assert [(each.of.pipeline, each.of.inside.tensor) for each in best] == [(4, 2), (8, 1), (2, 4), (1, 8)]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1", "zb-v", "gpipe", "seq1f1b"])
def test_a_long_step_follows_from_short_ones(schedule):
    costs = cost_model(MODELS[1], "dgx-a100-80", "pipeloom")
    chunks, slices = {"interleaved": 3, "zb-v": 2}.get(schedule, 1), 2 if schedule == "seq1f1b" else 1
    of = Configuration(
        schedule=schedule, pipeline=2, chunks=chunks, microbatches=1602 // (chunks * slices), data=2,
        slices=slices, blocks=(12 // (2 * chunks),) * (2 * chunks),
    )  # fmt: skip
    short, whole = simulated(costs, of), simulated(costs, of, whole=True)
    assert short.timeline.num_microbatches < of.microbatches
    assert short.step_seconds == pytest.approx(whole.step_seconds, rel=1e-3)
    assert short.peak_bytes == pytest.approx(whole.peak_bytes, rel=1e-3)


def test_a_long_step_of_one_rank_follows_from_short_ones():
    costs = cost_model(MODELS[0], "dgx-a100-80", "pipeloom")
    of = Configuration(schedule="interleaved", pipeline=1, chunks=2, microbatches=4096)
    short, whole = simulated(costs, of), simulated(costs, of, whole=True)
    assert short.timeline.num_microbatches < of.microbatches
    assert (short.makespan, short.peak_bytes) == (pytest.approx(whole.makespan), pytest.approx(whole.peak_bytes))


@pytest.mark.parametrize(("schedule", "ranks"), [("chimera", 8), ("zb-v", 4), ("dualpipe", 8), ("dualpipev", 4)])
def test_a_long_step_with_a_late_steady_state_follows_from_short_ones(schedule, ranks):
    """Ranks with embedding or head compute more: over many micro-batches, the others wait for them."""
    costs = cost_model(gpt(32, 1024, 16, sequence=512, vocabulary=32000), "dgx-a100-80", "pipeloom")
    chunks = 2 if schedule in ("zb-v", "dualpipev") else 1
    of = Configuration(schedule=schedule, pipeline=ranks, chunks=chunks, microbatches=512)
    short, whole = simulated(costs, of), simulated(costs, of, whole=True)
    assert short.timeline.num_microbatches < of.microbatches
    assert short.makespan == pytest.approx(whole.makespan, rel=1e-3)
    assert short.busy_seconds == pytest.approx(whole.busy_seconds)
    assert short.peak_bytes == pytest.approx(whole.peak_bytes)


@pytest.mark.parametrize(
    ("schedule", "chunks", "recompute", "offload"),
    [
        ("interleaved", 4, (Recompute.NONE,) * 8 + (Recompute.FULL,) * 8, None),
        ("bfs", 2, (Recompute.NONE,) * 8, 33),
        ("gpipe", 1, (Recompute.NONE,) * 4, 22),
    ],
)
def test_long_steps_that_recompute_on_some_stages_or_offload_follow_from_short_ones(
    schedule, chunks, recompute, offload
):
    """The memory of the first grows by no more than another backward; the others offload more and more."""
    costs = cost_model(gpt(32, 1024, 16, sequence=512, vocabulary=32000), "dgx-a100-80", "pipeloom")
    of = Configuration(
        schedule=schedule, pipeline=4, chunks=chunks, microbatches=800, recompute=recompute, offload=offload
    )
    short, whole = simulated(costs, of), simulated(costs, of, whole=True)
    assert short.makespan == pytest.approx(whole.makespan, rel=2e-3)
    assert short.peak_bytes == pytest.approx(whole.peak_bytes)


@pytest.mark.parametrize("name", ["interleaved", "bfs", "seq1f1b-interleaved", "hanayo", "dualpipe"])
def test_shapes_of_many_ranks_and_chunks_are_those_of_built_schedules(name):
    family = find(name)
    for ranks, chunks, slices in product((3, 4, 6, 20), (2, 3, 4, 5), (1, 2) if family.sliced else (1,)):
        try:
            number = None if family.chunks else chunks
            made = family(num_ranks=ranks, num_microbatches=2 * ranks, num_chunks=number, num_slices=slices)
        except ScheduleError:
            with pytest.raises(ScheduleError):
                shape_of(name, ranks, chunks, slices)
        else:
            assert shape_of(name, ranks, chunks, slices) == (made.placement, bool(made.split_backwards))


def test_meshes_with_uneven_blocks_or_a_long_bubble_come_later():
    costs, request = cost_model(gpt(128, 1024, 16), "dgx-a100-80", "pipeloom"), Request(devices=3072, batch_size=3072)
    shapes = Shapes(costs, request, Refusals())

    def factor(pipeline: int, microbatches: int) -> float:
        return shapes.likely_factor(Configuration(pipeline=pipeline, microbatches=microbatches))

    assert factor(1, 16) == 1.0
    assert factor(12, 4096) > 1.01 * factor(16, 4096)  # 11 of 130 blocks, embedding and head on a rank
    assert factor(16, 32) < factor(16, 16) < factor(32, 16)


def test_the_knapsack_is_exact():
    items = [[(0, 5), (2, 3), (5, 1)], [(0, 4), (1, 2), (9, 0)], [(0, 6), (3, 2)], *[[(0, 3), (1, 2), (4, 0)]] * 3]
    for most in range(25):
        fitting = [
            (sum(cost for cost, _ in chosen), sum(size for _, size in chosen))
            for chosen in product(*items)
            if sum(size for _, size in chosen) <= most
        ]
        found = knapsack(items, most)
        if not fitting:
            assert found is None
            continue
        assert found is not None
        chosen = [items[item][number] for item, number in enumerate(found)]
        assert sum(size for _, size in chosen) <= most
        assert sum(cost for cost, _ in chosen) == min(fitting)[0]


def test_blocks_balance_embedding_and_head():
    assert balanced_blocks([1.0] * 11 + [4.0], Placement.loop(4)) == (3, 4, 4, 1)
    assert balanced_blocks([1.0] * 8, Placement.loop(4)) == (2, 2, 2, 2)
    assert balanced_blocks([1.0, *[0.0] * 6, 2.0], Placement.loop(2)) == (4, 4)


def test_mixtures_of_recomputation_lie_between_its_kinds():
    assert mixed_seconds([(1.0, 3.0), (2.0, 1.0)]) == pytest.approx(5 / 3)
    assert mixed_seconds([(1.0, 0.5), (2.0, 0.1)]) == 1.0


def test_less_memory_is_never_faster_and_is_kept():
    steps = []
    for memory in (80 * GIB, 6 * GIB, 3 * GIB):
        best = search(MODELS[1], 8, 32, memory, fixed="context=1,slices=1,tensor=1,sequence=false", top=1).plans[0]
        assert best.peak <= memory
        steps.append(best.step_seconds)
    assert steps == sorted(steps)


def test_plans_side_by_side_do_not_differ_in_stages_without_a_pipeline_alone():
    plans = search(batch=16, devices=4, fixed="pipeline=1,context=1,slices=1", top=6).plans
    kinds = [(plan.of.inside, plan.of.data, plan.of.microbatch_size) for plan in plans]
    assert len(set(kinds)) == len(kinds) == 6
    assert plans[0].of.chunks == 1  # several stages are no faster where all fits


def test_a_search_on_few_devices_ends_too():
    costs = cost_model(MODELS[0], "dgx-a100-80", "pipeloom")
    request = Request(devices=8, batch_size=16, memory_bytes=80 * GIB, fixed={"slices": 1}, top=1)
    whole, ended = find_plans(costs, request), find_plans(costs, request, part=1e-3)
    assert whole.least == inf
    assert ended.least <= whole.plans[0].step_seconds <= ended.plans[0].step_seconds
    assert counts_of(ended)[0].startswith("The search ended early: no plan takes less than ")
    assert ended.refused["not looked at: the search ended"] > 0


def test_a_search_goes_on_where_it_ended():
    costs = cost_model(MODELS[0], "dgx-a100-80", "pipeloom")
    request = Request(devices=8, batch_size=16, memory_bytes=0.7 * GIB, fixed={"slices": 1, "context": 1}, top=1)

    def search() -> TreeSearch:
        best = BestPlans(request, lambda _: None, [])
        return TreeSearch(Steps(costs), request, best, exhaustive=False, can_run=lambda _: None, long_steps=True)

    whole, parts = search(), search()
    taken = [parts.run(0.002)]
    while parts.least < inf:
        least = parts.least
        taken.append(parts.run(0.01))
        assert parts.least >= least
    assert len(taken) > 2
    assert sum(taken) == pytest.approx(whole.run(10.0))
    assert parts.best.plans == whole.best.plans
    assert (parts.simulated, parts.refusals) == (whole.simulated, whole.refusals)


def test_searches_that_share_steps_simulate_nothing_twice(monkeypatch):
    costs, simulate, calls = cost_model(MODELS[0], "dgx-a100-80", "pipeloom"), StepCosts.seconds, []
    monkeypatch.setattr(StepCosts, "seconds", lambda *given: calls.append(given[1]) or simulate(*given))
    request = Request(devices=4, batch_size=8, memory_bytes=80 * GIB, fixed={"slices": 1, "context": 1}, top=1)
    steps = Steps(costs)
    first, number = find_plans(costs, request, steps=steps), len(calls)
    second = find_plans(costs, request, steps=steps)
    assert 0 < number == len(calls)
    assert second.plans == first.plans
    assert (second.considered, second.refused, second.least) == (first.considered, first.refused, first.least)


def test_a_fixed_data_strategy_needs_replicas():
    given = "context=1,slices=1,schedule=1f1b"
    free = search(batch=4, devices=4, fixed=given, top=8).plans
    fixed = search(batch=4, devices=4, fixed=f"{given},data_strategy=zero3", top=8).plans
    assert any(each.of.replicas == 1 for each in free)
    assert all(each.of.replicas > 1 and each.of.strategy.shards_parameters for each in fixed)


def test_objectives():
    fixed = "context=1,slices=1,schedule=1f1b,chunks=1"
    fast = search(fixed=fixed, top=1).plans[0]
    small = search(fixed=fixed, top=1, objective="memory").plans[0]
    cheap = search(fixed=fixed, top=1, objective="cost").plans[0]
    assert small.peak < fast.peak
    assert cheap.step_seconds * cheap.of.devices <= fast.step_seconds * fast.of.devices


def test_a_plan_runs_and_its_file_says_the_same(tmp_path, capsys):
    out = tmp_path / "plan.json"
    words = "--cluster dgx-a100-80 --devices 8 --batch.size 16 --model.layers 8 --model.width 512 --model.heads 8"
    more = f"--vocabulary_size 1000 --memory.cap 300MiB --json --out {out} --fix context=1,slices=1"
    assert main(["plan", *words.split(), *more.split()]) == 0
    answer = json.loads(capsys.readouterr().out)
    best, plan = answer["plans"][0], Plan.load(out)
    assert [each["step_seconds"] for each in answer["plans"]] == sorted(e["step_seconds"] for e in answer["plans"])
    assert sum(best["seconds"].values()) == pytest.approx(best["step_seconds"])
    assert max(best["peak_bytes"]) <= 300 * 2**20
    assert answer["considered"] >= sum(answer["refused"].values())
    assert (plan.pipeline, plan.data, plan.tensor) == (best["pipeline"], best["data"], best["tensor"])
    assert plan.num_processes == 8
    assert plan.predicted_step_seconds == best["step_seconds"]
    sizes = {"layers": 8, "width": 512, "heads": 8}
    config = planned_config(TrainConfig.from_mapping({"model": sizes, "batch": {"size": 16}}), plan)
    assert config.num_processes == 8


def test_the_words(capsys):
    words = "--cluster dgx-a100-80 --devices 8 --batch.size 16 --model.layers 8 --model.width 512 --model.heads 8"
    assert main(["plan", *words.split(), "--vocabulary_size", "1000", "--fix", "context=1,slices=1,chunks=1"]) == 0
    said = capsys.readouterr().out
    assert "tokens/s" in said
    assert "\nplan 2: " in said
    assert "\nplan 3: " in said
    assert "usual choice" in said
    assert "configurations considered" in said
    assert "is above" not in said
    more = "--memory.cap 100GiB --fix context=1,slices=1,chunks=1,pipeline=1,tensor=1"
    assert main(["plan", *words.split(), "--vocabulary_size", "1000", *more.split()]) == 0
    assert capsys.readouterr().out.startswith("--memory.cap is above the 80 GiB of a device: these plans need devices")


def test_the_words_for_others():
    part = dict.fromkeys(("compute", "recompute", "tensor", "context", "expert", "pipeline", "data", "optimizer"), 0.0)
    sizes = {"pipeline": 4, "data": 2, "tensor": 1, "context": 1, "expert": 1, "chunks": 1, "slices": 1}
    best = {
        **sizes, "schedule": "zb-v", "step_seconds": 4.0, "seconds": {**part, "compute": 3.0, "pipeline": 1.0},
        "peak_bytes": [GIB, GIB], "recompute": "none", "microbatches": 8, "microbatch_size": 1, "offload": None,
        "devices": 8,
    }  # fmt: skip
    slow = {**best, "schedule": "1f1b", "step_seconds": 5.0, "seconds": {**best["seconds"], "pipeline": 2.0}}
    large = {**best, "step_seconds": 2.0, "peak_bytes": [GIB, 2 * GIB]}
    slowest = {**slow, "pipeline": 1, "step_seconds": 9.0}
    assert against(best, slow, 2) == "plan 2: 25.0 % slower: bubble and messages +1 s"
    assert against(best, {**slow, "offload": 2}, 2) == "plan 2: 25.0 % slower: bubble, messages and offload +1 s"
    less = {**slow, "seconds": {**slow["seconds"], "compute": 2.5, "optimizer": 0.5}}
    assert (
        against(best, less, 2)
        == "plan 2: 25.0 % slower: bubble and messages +1 s, optimizer +500 ms, computing -500 ms"
    )
    assert against(best, large, 3) == "plan 3: 50.0 % faster, 1 GiB more per device"
    others = {count: {**large, "devices": count, "peak_bytes": best["peak_bytes"]} for count in (24, 40)}
    assert against(best, others[24], 2) == "plan 2: 50.0 % faster; on 24 devices, 50.0 % more device time"
    assert against(best, others[40], 2) == "plan 2: 50.0 % faster; on 40 devices, 2.5 times the device time"
    assert usual_text(best, dict(best), "usual choice") == "usual choice: plan 1"
    assert usual_text(best, slowest, "usual choice") == (
        "usual choice (data 2, micro-batches 8 x 1, recompute none): 9 s, 2.2 times as long as plan 1: "
        "bubble and messages +1 s"
    )


@pytest.mark.parametrize(
    ("fixed", "why"),
    [
        ("data=3", "8 devices cannot be divided by data=3"),
        ("data=8,microbatch_size=3", "16 samples cannot be divided by data=8 x microbatch_size=3"),
        ("blocks=3,4,pipeline=2", "blocks=3,4 add up to 7, and the model has 8"),
        ("expert=2", "expert=2: the model has no experts"),
        ("context=2,slices=2", "context=2 and slices=2: both divide sequences"),
        ("slices=3", "slices=3: must divide the 512 tokens of a sequence"),
        ("chunks=16", "chunks=16: more stages than the 8 blocks of the model"),
        ("schedule=1f1b,chunks=2,pipeline=2", "chunks=2: schedule '1f1b' has 1 stage per rank"),
        ("sequence=true,tensor=1", "sequence=true has no effect with tensor=1"),
        ("pipeline=2,data=1,tensor=1,context=1", "pipeline=2 x data=1 x tensor=1 x context=1 use 2 of 8 devices"),
        (
            "data=2,microbatches=2,microbatch_size=2",
            "data=2 x microbatches=2 x microbatch_size=2 are 8 of 16 samples",
        ),
        ("data=1,context=1,data_strategy=zero3", "data_strategy=zero3 has no effect with one replica"),
        ("pipeline=4,tensor=2,data_strategy=zero1", "data_strategy=zero1 has no effect with one replica"),
        ("pipeline=4,recompute=full,none", "recompute=full,none: 2 stages cannot be divided by pipeline=4"),
        ("pipeline=4,blocks=2,6", "blocks=2,6: 2 stages cannot be divided by pipeline=4"),
        (
            "data=2,data_strategy=zero1,data_granularity=chunk",
            "data_granularity=chunk: works with data_strategy zero2 and zero3, not zero1",
        ),
    ],
)
def test_the_error_says_which_fixed_values_do_not_divide(fixed, why):
    with pytest.raises(InputError, match=f"no plan can run: {why}"):
        search(fixed=fixed)


LLAMA = {
    "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8,
    "num_key_value_heads": 2, "intermediate_size": 1376, "vocab_size": 32000, "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5, "hidden_act": "silu",
}  # fmt: skip


def test_a_configuration_of_hugging_face(tmp_path, capsys):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    words = f"--cluster dgx-h100 --devices 4 --batch.size 8 --model.config {file} --json --fix context=1,slices=1"
    assert main(["plan", *words.split()]) == 0
    assert json.loads(capsys.readouterr().out)["plans"][0]["devices"] == 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "--cluster dgx-b900 --devices 8 --batch.size 8",
            "must be p3.16xlarge, dgx-a100-80, dgx-h100, dgx-h200, local",
        ),
        ("--cluster dgx-h100 --devices 8 --batch.size 8 --memory.cap 1MiB", "more. Use more devices"),
        ("--cluster dgx-h100 --devices 7 --batch.size 5 --fix data=7", "5 samples cannot be divided by data=7"),
        ("--cluster dgx-h100 --devices 8 --batch.size 8 --fix pipelin=2", "key 'pipelin' is unknown"),
        ("--cluster dgx-h100 --devices 8 --batch.size 8 --fix pipeline=x", "must be an integer"),
        ("--cluster dgx-h100 --devices 8 --batch.size 8 --forbid speed", "cannot be forbidden"),
        ("--cluster dgx-h100 --devices 8 --batch.size 8 --memory.cap 0", "must be at least 1 byte"),
        ("--cluster dgx-h100 --devices 8 --batch.size 8 --memory.cap 1MiB --forbid offload", "or change --forbid"),
        (
            "--cluster dgx-h100 --devices 6 --batch.size 8 --fix pipeline=3,schedule=chimera",
            "run: pipeline=3: schedule",
        ),
        (
            "--cluster dgx-h100 --devices 8 --batch.size 8 --fix offload_states=true --forbid offload",
            "offload is that of states too",
        ),
        ("--cluster dgx-h100 --devices 0 --batch.size 8", "--devices=0: must be at least 1"),
        ("--cluster dgx-h100 --devices 8 --batch.size 8 --model.config nothing", "must be gpt3-175b"),
    ],
)
def test_bad_input_is_one_line(words, said, capsys):
    assert main(["plan", *words.split(), "--vocabulary_size", "1000"]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_no_plan_says_what_is_missing():
    with pytest.raises(InputError, match=r"needs .* more"):
        search(MODELS[1], 2, 4, 1 * GIB, fixed="context=1,slices=1")


def test_recomputation_can_be_forbidden():
    found = search(fixed="context=1,slices=1", forbidden=frozenset({"recompute"}), top=1).plans[0]
    assert {found.of.recompute_of(stage) for stage in range(found.of.stages)} == {Recompute.NONE}


def test_lines_have_the_plans():
    from pipeloom.plan.search.answer import row_of

    answer = search(fixed="context=1,slices=1,schedule=1f1b", top=2)
    costs = cost_model(MODELS[0], "dgx-a100-80", "pipeloom")
    rows = [row_of(costs, found) for found in answer.plans]
    lines = lines_of(rows, 80 * GIB, rows[0]["devices"])
    assert lines[1].split()[0] == "1"
    assert not [line for line in lines if "are used" in line]
    twice = 2 * rows[0]["devices"]
    assert f"devices: {rows[0]['devices']} of {twice} are used" in lines_of(rows, 80 * GIB, twice)


def test_plans_that_look_alike_have_a_column_that_tells_them_apart():
    from pipeloom.plan.search.answer import row_of

    found = search(fixed="schedule=1f1b,slices=1", top=1).plans[0]
    row = row_of(cost_model(MODELS[0], "dgx-a100-80", "pipeloom"), found)
    heads = cells_of([row, row])[0]
    assert not {"blocks", "mesh axes", "context kind"} & set(heads)
    first, *others = cells_of([{**row, "blocks": [5, 6, 6, 6, 4]}, {**row, "blocks": [*range(1, 12)]}])
    assert [dict(zip(first, line, strict=True))["blocks"] for line in others] == [
        "5 + 3 x 6 + 4",
        "1 + 2 + 3 + 4 + 5 + 6 + ... + 11",
    ]
    kinds = [{**row, "context": 2, "context_kind": kind} for kind in ("ring", "ulysses")]
    assert cells_of(kinds)[0] == [*(head for head in heads[:4]), "context", *heads[4:-3], "context kind", *heads[-3:]]
    other = {**kinds[0], "pipeline": 2, "data": 2, "order": "dp,pp,cp,tp"}
    assert "mesh axes" in cells_of([other, {**other, "order": "pp,dp,cp,tp"}])[0]
    assert "mesh axes" not in cells_of([other, {**other, "microbatches": 64, "order": "pp,dp,cp,tp"}])[0]


def test_more_ranks_than_blocks_are_named_as_given():
    with pytest.raises(InputError, match="no plan can run: pipeline=16: more stages than the 8 blocks of the model"):
        search(devices=16, fixed="pipeline=16")


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ({"forbidden": {"data", "tensor", "context"}, "devices": 16}, "pipeline=16: more stages than the 8 blocks"),
        ({"fixed": "sequence=true,context=8"}, "sequence=true has no effect with tensor=1"),
        (
            {"fixed": "microbatches=2,microbatch_size=2,pipeline=4,tensor=2"},
            "data=1 x microbatches=2 x",
        ),
        (
            {"fixed": "data_granularity=chunk", "forbidden": {"data_strategy"}},
            "works with data_strategy zero2 and zero3",
        ),
        (
            {"fixed": "pipeline=2,tensor=2,context=2,microbatch_size=3"},
            "16 samples cannot be divided by microbatch_size",
        ),
        (
            {"fixed": "pipeline=1,tensor=1,context=1,microbatch_size=4"},
            "by data=8 x microbatch_size=4. Change devices,",
        ),
        ({"fixed": "precision=bf16", "cluster": "p3.16xlarge"}, "fp16 at its full rate. Change fix."),
    ],
)
def test_what_no_plan_can_have_is_named_with_what_follows_from_it(case, said):
    names = PYTHON._replace(devices="devices", batch="batch", given=("fix",))
    with pytest.raises(InputError) as error:
        search(**{**case, "forbidden": frozenset(case.get("forbidden", ()))}, names=names)
    assert said in str(error.value)


def test_gradients_of_several_stages_of_a_rank_need_not_be_there_together():
    model = gpt(32, 4096, 32, sequence=512, vocabulary=1000)
    fixed = "pipeline=2,context=1,tensor=1,slices=1,microbatch_size=1,schedule=interleaved,chunks=8,data_strategy=zero1"
    kept = fixed + ",offload=none,offload_states=false"
    found = search(model, 8, 8, 21 * GIB, fixed=kept, top=1).plans[0]
    none = search(model, 8, 8, 30 * GIB, fixed=kept + ",recompute=none", top=1).plans[0]
    assert none.peak < 20 * GIB
    assert found.step_seconds == none.step_seconds


def test_fewer_devices_are_no_reason_where_the_cost_counts():
    fixed = "pipeline=1,data=1,tensor=1,context=1,chunks=16"
    with pytest.raises(InputError) as told:
        search(fixed=fixed, objective="cost")
    assert "of 8 devices" not in str(told.value)


def test_kinds_of_recomputation_for_another_number_of_stages_are_no_lack_of_memory():
    with pytest.raises(InputError, match="the kinds of recomputation do not fit the stages"):
        search(fixed="recompute=full,none,full,none,schedule=1f1b,pipeline=2")


def test_embedding_and_head_alone_can_be_fixed():
    fixed = "pipeline=4,data=2,tensor=1,context=1,slices=1,schedule=1f1b,blocks=0,4,4,0"
    assert search(fixed=fixed, top=1).plans[0].of.blocks == (0, 4, 4, 0)
    with pytest.raises(InputError, match="each stage of this model needs a block"):
        search(fixed=fixed, ends_alone=False)
    with pytest.raises(InputError, match="must be an integer of at least 1"):
        parse_fixed("blocks=4,0,4")
    with pytest.raises(InputError, match="offload=cpu: must be none, or the number of activations"):
        parse_fixed("offload=cpu")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"intermediate_size": "1376"}, "intermediate_size is '1376': must be an integer of at least 1."),
        ({"intermediate_size": -5}, "intermediate_size is -5: must be an integer of at least 1."),
        ({"num_key_value_heads": [2]}, r"num_key_value_heads is \[2\]: must be an integer of at least 1."),
        ({"num_local_experts": -8}, "num_local_experts is -8: must be an integer of at least 1."),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes': must be true or false."),
        ({"hidden_act": "silo"}, "hidden_act is 'silo': must be one of silu, "),
        ({"hidden_act": ["silu"]}, r"hidden_act is \['silu'\]: must be one of "),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layers of kind 'linear_attention', which are not"),
        ({"kv_lora_rank": 512}, "layers of kind 'multi-head latent attention"),
    ],
)
def test_wrong_values_of_a_configuration_are_not_replaced_by_defaults(wrong, said):
    with pytest.raises(InputError, match=said):
        architecture_of(LLAMA | wrong, "--model.config config.json")


def test_zero_and_null_of_a_configuration_are_defaults():
    known = architecture_of(LLAMA, "config.json")
    nothing = {"num_local_experts": 0, "n_shared_experts": 0, "n_inner": None, "tie_word_embeddings": None}
    assert architecture_of(LLAMA | nothing, "config.json") == known


def test_a_rank_has_several_stages_where_only_some_have_to_recompute():
    """Without a pipeline too: with one stage, all blocks would recompute."""
    model, fixed = gpt(16, 2048, 16), "pipeline=1,tensor=1,context=1,microbatch_size=4,data_strategy=zero1"
    case = {
        "devices": 4,
        "batch": 16,
        "memory": 13 * GIB,
        "top": 1,
        "forbidden": frozenset({"offload", "offload_states"}),
    }
    found = search(model, fixed=fixed, **case).plans[0]
    kinds = {found.of.recompute_of(stage) for stage in range(found.of.stages)}
    assert (found.of.pipeline, kinds) == (1, {Recompute.NONE, Recompute.FULL})
    assert found.step_seconds < search(model, fixed=fixed + ",schedule=1f1b", **case).plans[0].step_seconds
    chunks = search(model, fixed=fixed + f",chunks={found.of.chunks}", **case).plans[0]
    assert chunks.step_seconds == found.step_seconds


@pytest.mark.parametrize(
    ("objective", "line"),
    [
        ("time", "no plan takes less than 2 s; plan 1 takes 50.0 % more."),
        ("cost", "no plan takes less than 2 s x devices; plan 1 takes 50.0 % more."),
        ("memory", "no plan needs less than 2 B per device; plan 1 needs 50.0 % more."),
    ],
)
def test_a_search_that_ends_early_names_what_is_minimized(objective, line):
    assert counts_of(Answer(objective=objective, value=3.0, least=2.0))[0] == f"The search ended early: {line}"
    assert not counts_of(Answer(objective=objective, value=3.0, least=3.5))[0].startswith("The search ended early")


def test_a_plan_file_does_not_call_a_plan_the_fastest_where_the_search_ended_early(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("pipeloom.plan.search.tree.tree_search._MOST_STEPS", 1.0)
    out = tmp_path / "plan.json"
    words = "--cluster dgx-a100-80 --devices 8 --batch.size 16 --model.layers 8 --model.width 512 --model.heads 8"
    assert main(["plan", *words.split(), "--vocabulary_size", "1000", "--out", str(out), "--json"]) == 0
    why = " ".join(Plan.load(out).why)
    assert "The search ended early" in why
    assert "It is the fastest" not in why
    capsys.readouterr()


def test_the_usual_choice_has_the_tensor_degree_that_is_fixed():
    costs = cost_model(MODELS[1], "dgx-a100-80", "pipeloom")
    request = Request(devices=8, batch_size=32, memory_bytes=4 * GIB, fixed={"tensor": 1, "sequence": False})
    found = usual_plan(costs, request)
    assert found is not None
    assert (found.of.inside.tensor, found.of.pipeline > 1) == (1, True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layers": 20_000}, "model layers=20000: must be at most 10,000"),
        ({"width": 1e200}, "must be at most 1,099,511,627,776"),
        ({"experts": 10**15, "top_k": 2}, "model experts=1000000000000000: must be at most"),
    ],
)
def test_sizes_that_are_far_too_large_are_one_line(tmp_path, capsys, change, said):
    file = tmp_path / "model.json"
    sizes = {"layers": 8, "width": 512, "heads": 8, "vocabulary_size": 1000, "sequence_length": 512}
    file.write_text(json.dumps(sizes | change))
    words = f"--cluster dgx-a100-80 --devices 8 --batch.size 16 --model.config {file}"
    assert main(["plan", *words.split()]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_finer_granularities_are_tried_on_many_devices_where_coarse_ones_have_to_recompute():
    fixed = "tensor=1,context=1,slices=1,schedule=1f1b,offload=none,offload_states=false,pipeline=2,microbatch_size=1"
    case = {"model": gpt(24, 6144, 48), "devices": 128, "batch": 512, "memory": 40 * GIB, "top": 1}
    free, coarse, fine = (
        search(**case, fixed=f"{fixed}{more}").plans[0].step_seconds
        for more in ("", ",data_granularity=step", ",data_granularity=microbatch")
    )
    assert free == fine < 0.9 * coarse


@pytest.mark.parametrize("optimizer", ["adafactor", "lion"])
def test_plans_keep_the_rules_of_the_optimizer(optimizer, tmp_path, capsys):
    out = tmp_path / "plan.json"
    words = "--cluster dgx-a100-80 --devices 4 --batch.size 8 --model.layers 4 --model.width 512 --model.heads 8"
    more = f"--vocabulary_size 1000 --optimizer {optimizer} --out {out} --fix tensor=2"
    code = main(["plan", *words.split(), *more.split(), "--json"])
    if optimizer == "adafactor":
        assert code == 2
        assert "does not work with parallel.tensor" in capsys.readouterr().err
        return
    assert code == 0
    sizes = {"layers": 4, "width": 512, "heads": 8}
    asked = {"model": sizes, "batch": {"size": 8}, "optimizer": {"name": optimizer}}
    planned_config(TrainConfig.from_mapping(asked), Plan.load(out))


def test_plans_that_steps_compare_include_a_plain_one():
    costs = cost_model(MODELS[0], "dgx-a100-80", "pipeloom")
    fixed = parse_fixed("pipeline=4,tensor=1,context=1,microbatches=8,slices=1,recompute=none")
    request = Request(devices=4, batch_size=16, memory_bytes=80 * GIB, fixed=fixed, top=2)
    found = find_plans(costs, request).plans
    assert plain_of(found) is None
    first, plain = with_plain(costs, request, found)
    assert (first, plain.of.schedule, plain.of.chunks, plain.of.pipeline) == (found[0], "1f1b", 1, 4)
    assert with_plain(costs, request, [first, plain]) == [first, plain]
    slower = replace(found[1], step_seconds=1.001 * plain.step_seconds)
    of_three = with_plain(costs, replace(request, top=3), [first, slower, slower])
    assert [each.step_seconds for each in of_three] == [first.step_seconds, plain.step_seconds, slower.step_seconds]
    other = replace(request, fixed={**fixed, "schedule": "zb-h1"})
    assert with_plain(costs, other, found) == found


@pytest.mark.whole_grid
@pytest.mark.parametrize("pipeline", [1, 2, 4, 8, 16])
def test_on_many_devices_a_fixed_pipeline_degree_is_no_faster_than_the_plan(pipeline):
    case = {"model": gpt(96, 12288, 96, vocabulary=51200), "cluster": "dgx-h100", "devices": 512, "batch": 512}
    case |= {"memory": 0.92 * 80e9, "top": 1}
    best = search(**case).plans[0].step_seconds
    assert best <= 1.01 * search(**case, fixed=f"pipeline={pipeline}").plans[0].step_seconds


@pytest.mark.parametrize(
    ("layers", "devices", "batch", "length", "fixed"),
    [
        (64, 256, 512, 4096, "pipeline=1,tensor=1"),  # several stages on ranks without a pipeline, near the bounds
        (80, 128, 256, 4096, "pipeline=1,tensor=1"),  # the same, far from them
        pytest.param(80, 256, 512, 8192, "pipeline=2,tensor=2", marks=pytest.mark.whole_grid),
    ],
)
def test_on_many_devices_fixed_degrees_are_no_faster_than_the_plan(layers, devices, batch, length, fixed):
    case = {"model": gpt(layers, 8192, 64, sequence=length, vocabulary=128256), "cluster": "dgx-h100", "top": 1}
    case |= {"devices": devices, "batch": batch, "memory": 73.6 * GIB}
    best = search(**case).plans[0].step_seconds
    assert best <= 1.005 * search(**case, fixed=fixed).plans[0].step_seconds


def test_models_with_experts_are_looked_at_with_each_expert_degree(monkeypatch):
    """A search of all of them would end early, among other degrees."""
    monkeypatch.setattr("pipeloom.plan.search.tree.tree_search._MOST_STEPS", 40.0)
    model = replace(gpt(8, 1024, 16, vocabulary=32000), experts=ExpertSizes(experts=16, top_k=2, expert_width=4096))
    case = {"model": model, "devices": 8, "batch": 32, "memory": 8 * GIB, "top": 1}
    best = search(**case).plans[0].step_seconds
    for expert in (1, 2, 4, 8):
        assert best <= 1.01 * search(**case, fixed=f"expert={expert},pipeline=1").plans[0].step_seconds


def test_the_usual_choice_of_a_model_with_experts_on_many_devices():
    """Each expert degree is a part of the space, which has a turn."""
    model = replace(gpt(8, 1024, 16, vocabulary=32000), experts=ExpertSizes(experts=16, top_k=2, expert_width=4096))
    costs = cost_model(model, "dgx-a100-80", "pipeloom")
    usual = usual_plan(costs, Request(devices=128, batch_size=128, memory_bytes=80 * GIB))
    assert usual is not None
    assert (usual.of.inside.tensor, usual.of.schedule, usual.of.devices) == (8, "1f1b", 128)


def test_offload_does_not_hide_what_a_plan_needs_at_least(monkeypatch):
    """A search that ends early, among plans that offload, would say that the model needs more memory than it does."""
    monkeypatch.setattr("pipeloom.plan.search.tree.tree_search._MOST_STEPS", 400.0)
    needed = []
    for forbidden in (frozenset(), frozenset({"offload", "offload_states"})):
        with pytest.raises(InputError, match="no plan fits into 1 GiB per device; the smallest one found needs") as no:
            search(gpt(126, 16384, 128), 8, 8, GIB, forbidden=forbidden)
        needed.append(float(re.findall(r"needs ([\d.]+) GiB", str(no.value))[0]))
    assert needed[0] <= needed[1]


def test_plans_for_v100_train_in_fp16():
    """Its tensor cores know no bfloat16."""
    best = search(MODELS[0], 8, 16, 14 * GIB, cluster="p3.16xlarge", top=1).plans[0]
    assert best.of.precision.dtype == "fp16"
    both = search(MODELS[0], 8, 16, 14 * GIB, cluster="p3.16xlarge", top=1, precisions=("bf16", "fp16"))
    assert both.plans[0].of == best.of
    assert any("V100-SXM2-16GB computes it slowly" in reason for reason in both.refused)
    with pytest.raises(InputError, match="precision=bf16: V100-SXM2-16GB computes it slowly"):
        search(MODELS[0], 8, 16, 14 * GIB, cluster="p3.16xlarge", fixed="precision=bf16")


@pytest.mark.parametrize(
    ("model", "case", "fixed"),
    [
        (
            gpt(8, 1536, 24, sequence=1024, vocabulary=256),
            {"batch": 16, "memory": 1_007_954_048},
            ("tensor=1,pipeline=1", "pipeline=2,schedule=zb-v"),
        ),
        (  # of few plans that fit, nearly all take much longer, and closed forms do not tell which do not
            gpt(8, 1024, 16, sequence=512, vocabulary=32000),
            {"batch": 16, "memory": 0.5 * GIB},
            ("pipeline=2",),
        ),
        (  # states leave, and stages recompute or not, on ranks without a pipeline
            gpt(6, 2048, 32, sequence=2048, vocabulary=32000),
            {"devices": 4, "batch": 16, "memory": 1.25 * GIB, "cluster": "p3.16xlarge"},
            ("offload_states=true", "context=4", "data_strategy=zero3", "tensor=4"),
        ),
        pytest.param(  # states fill the memory: some plans offload them, others wait for their links
            gpt(24, 2048, 16, sequence=1024, vocabulary=128256),
            {"devices": 64, "batch": 128, "memory": 0.7 * GIB, "cluster": "dgx-h200"},
            ("pipeline=8,tensor=8", "pipeline=4,tensor=8"),
            marks=pytest.mark.whole_grid,
        ),
        pytest.param(
            replace(NAMED["mixtral-8x7b"], sequence_length=4096),
            {"devices": 48, "batch": 48, "memory": 40e9, "cluster": "dgx-h200"},
            ("expert=8", "expert=8,pipeline=2", "expert=4", "pipeline=1"),
            marks=pytest.mark.whole_grid,
        ),
    ],
    ids=["dense", "few fit", "states leave", "offload", "experts"],
)
def test_with_little_memory_no_fixed_values_lead_to_a_faster_plan(model, case, fixed):
    free = search(model, **case).plans[0].step_seconds
    for values in fixed:
        assert free <= 1.01 * search(model, **case, fixed=values).plans[0].step_seconds, values


def test_a_search_ends_where_no_plan_fits_on_many_devices(monkeypatch):
    taken: list[float] = []

    run = TreeSearch.run
    monkeypatch.setattr(TreeSearch, "run", lambda *given, **more: taken.append(run(*given, **more)) or taken[-1])
    experts = ExpertSizes(experts=128, top_k=2, expert_width=10240, gated=True)
    model = replace(gpt(8, 2560, 40, sequence=128, vocabulary=256000), experts=experts, experts_every=8)
    case = {"model": model, "devices": 96, "batch": 4096, "cluster": "p3.16xlarge", "top": 1}
    with pytest.raises(InputError, match="the smallest one found needs "):
        search(memory=3 * GIB, **case)
    assert sum(taken) < 12  # of the steps of a search


def test_rings_are_as_slow_as_the_links_that_an_order_of_the_mesh_leaves_them():
    """Also where the same sizes were asked for in another order before; and so no plan has parts below 0."""
    model = gpt(16, 2048, 16, sequence=16384)
    inside, orders = InsideStage(context=4), (("dp", "pp", "cp", "tp"), ("cp", "pp", "dp", "tp"))
    costs = cost_model(model, "dgx-a100-80", "pipeloom")
    for order in orders:
        of = Configuration(pipeline=2, data=4, inside=inside, microbatches=4, order=order)
        assert costs.stage_seconds(of) == cost_model(model, "dgx-a100-80", "pipeloom").stage_seconds(of)
    near, far = (
        sum(map(sum, costs.stage_seconds(Configuration(pipeline=2, data=4, inside=inside, order=order))))
        for order in orders
    )
    assert near < far  # between nodes
    for found in search(model, 32, 32, fixed="context=4,pipeline=2,order=cp,pp,dp,tp", top=3).plans:
        assert min(seconds_of(costs, found).values()) >= 0
