"""Offload as an axis of `pipeloom plan`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeloom.cli import main
from pipeloom.errors import InputError
from pipeloom.ir import Op
from pipeloom.ir.recompute import Recompute
from pipeloom.passes import insert_offload, lower
from pipeloom.passes.offload import least_held
from pipeloom.plan.costs.configuration import Configuration
from pipeloom.plan.search.answer import plan_of
from pipeloom.plan.search.best_first import Answer, find_plans
from pipeloom.plan.search.memory.live_moments import moments_of
from pipeloom.plan.search.memory.memory_choice import MemoryChoices
from pipeloom.plan.search.memory.offload_bound import least_moves, lowest_cap, most_live
from pipeloom.plan.search.request import Request, parse_fixed
from pipeloom.plan.search.space.shapes import Shape, shape_of
from pipeloom.schedules import find
from tests.pure.published_runs import cost_model, gpt

GIB = 2.0**30
MODEL = gpt(8, 2048, 16, sequence=2048, vocabulary=8000)
FREE = "context=1,slices=1,tensor=1,sequence=false,data=1,pipeline=8,microbatch_size=2"
PIPELINE = f"{FREE},offload_states=false"


def search(memory: float, fixed: str, *, model=MODEL, host=None, batch=32, exhaustive=False, **more) -> Answer:
    costs = cost_model(model, "dgx-a100-80", "pipeloom")
    if host is not None:
        costs = replace(costs, cluster=replace(costs.cluster, host_memory_bytes=host))
    request = Request(devices=8, batch_size=batch, memory_bytes=memory, fixed=parse_fixed(fixed), top=1, **more)
    return find_plans(costs, request, exhaustive=exhaustive)


@pytest.mark.parametrize("memory", [2.5 * GIB, 3 * GIB])
def test_what_only_offload_fits_is_as_good_as_simulating_everything(memory):
    fixed = f"{PIPELINE},schedule=1f1b,recompute=none"
    best, every = (search(memory, fixed, exhaustive=each) for each in (False, True))
    found = best.plans[0]
    assert found.of.offload is not None
    assert found.peak <= memory
    assert found.step_seconds <= 1.01 * every.plans[0].step_seconds
    plan = plan_of(cost_model(MODEL, "dgx-a100-80", "pipeloom"), found.of)
    assert (plan.offload, plan.offload_activations) == ("cpu", found.of.offload)
    with pytest.raises(InputError, match="no plan fits"):
        search(memory, fixed, forbidden=frozenset({"offload"}))
    with pytest.raises(InputError, match="what is offloaded needs more memory than the host has"):
        search(memory, fixed, host=1e9)


def test_offload_that_computations_hide_is_better_than_recomputation():
    wide = gpt(8, 8192, 64, sequence=2048, vocabulary=8000)
    fixed = f"{PIPELINE},schedule=1f1b"
    best, without = (search(20 * GIB, fixed, model=wide, forbidden=frozenset(each)) for each in ((), ("offload",)))
    assert best.plans[0].of.offload is not None
    assert best.plans[0].step_seconds < 0.97 * without.plans[0].step_seconds


def test_keys_and_values_of_slices_stay_on_the_device():
    costs = cost_model(gpt(8, 8192, 64, sequence=2048, vocabulary=8000), "dgx-a100-80", "pipeloom")
    of = Configuration(
        schedule="seq1f1b", pipeline=8, slices=4, microbatches=16, microbatch_size=2, blocks=(1,) * 8,
        recompute=Recompute.FULL,
    )  # fmt: skip
    whole = max(costs.peak_bytes(of))
    shape = Shape(of, *shape_of("seq1f1b", 8, 1, 4))
    request = Request(devices=8, batch_size=32, memory_bytes=0.98 * whole)
    memory = MemoryChoices(costs, shape, moments_of(of, merged=costs.merges_backwards), request)
    (choice,) = memory.offloaded(of)[(Recompute.FULL,) * 8]
    assert 0.97 * whole < choice.least_bytes <= max(costs.peak_bytes(choice.of))  # 0.935 without keys and values


def test_states_are_offloaded_where_a_step_has_many_micro_batches():
    fixed = f"{FREE},schedule=1f1b,recompute=none"
    best, every = (search(3 * GIB, fixed, batch=128, exhaustive=each) for each in (False, True))
    found = best.plans[0]
    assert (found.of.offload_states, found.of.offload) == (True, None)
    assert found.peak <= 3 * GIB
    assert found.step_seconds <= 1.01 * every.plans[0].step_seconds
    kept = search(4 * GIB, fixed, batch=128).plans[0]
    assert not kept.of.offload_states
    # Eight bytes per parameter leave, and cross the link to the host twice while the update computes.
    costs = cost_model(MODEL, "dgx-a100-80", "pipeloom")
    most = max(costs.parameters(found.of))
    assert kept.peak - found.peak == pytest.approx(8 * costs.parameters(found.of)[0], rel=1e-3)
    assert found.update_seconds == pytest.approx(16 * most / costs.cluster.host_rate)
    plan = plan_of(costs, found.of)
    assert (plan.offload, plan.offload_states, plan.offload_activations) == ("cpu", True, None)


def test_more_is_recomputed_where_closed_forms_lack_much():
    wide = gpt(8, 8192, 64, sequence=2048, vocabulary=8000)  # gradients of a block are 1.5 GiB
    found = search(19 * GIB, f"{PIPELINE},schedule=1f1b", model=wide, forbidden=frozenset({"offload"}))
    assert found.plans[0].peak <= 19 * GIB


def test_nothing_is_offloaded_where_all_fits():
    found = search(80 * GIB, f"{PIPELINE},schedule=1f1b")
    assert found.plans[0].of.offload is None


def test_least_memory_offloads_all_that_it_can():
    fixed = f"{PIPELINE},schedule=1f1b"
    least, usual = (search(80 * GIB, fixed, objective=each) for each in ("memory", "time"))
    assert least.plans[0].of.offload == 0
    assert least.plans[0].peak < usual.plans[0].peak


def test_as_few_activations_as_possible_are_kept_also_for_time_and_fewer_are_refused():
    fixed = f"{PIPELINE},schedule=1f1b,recompute=none"
    assert search(80 * GIB, f"{fixed},offload=0").plans[0].of.offload == 0
    with pytest.raises(InputError, match=r"offload=1 keeps fewer activations than a rank needs at once \(3\)"):
        search(80 * GIB, f"{fixed},offload=1")


@pytest.mark.parametrize(
    ("name", "chunks"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zb-v", 2), ("dualpipev", 2)]
)
def test_moves_are_never_fewer_than_the_bound(name, chunks):
    of = Configuration(schedule=name, pipeline=4, chunks=chunks, microbatches=12)
    family = find(name)
    schedule = family(num_ranks=4, num_microbatches=12, num_chunks=None if family.chunks else chunks)
    program = lower(schedule)
    assert lowest_cap(of) == max(least_held(program))
    assert most_live(of) > lowest_cap(of)
    for cap in (0, *range(lowest_cap(of), most_live(of))):
        orders = insert_offload(program, cap or least_held(program)).orders
        moved = [sum(action.op is Op.OFFLOAD for action in order) for order in orders]
        bounds = least_moves(of, cap)
        assert all(number >= bound for number, (bound, _) in zip(moved, bounds, strict=True))
        assert max(bound for bound, _ in bounds) >= 0.5 * max(moved)


@pytest.mark.parametrize("fixed", ["offload=2", "offload=0", "offload_states=true"])
def test_offload_needs_a_link_to_the_host(capsys, tmp_path, fixed):
    file = tmp_path / "cluster.json"
    cluster = cost_model(MODEL, "dgx-a100-80", "pipeloom").cluster
    file.write_text(replace(cluster, device=replace(cluster.device, host_bytes_per_second=None)).to_json())
    words = ["--devices", "8", "--batch.size", "16", "--cluster", str(file), "--vocabulary_size", "1000"]
    assert main(["plan", *words, "--fix", fixed]) == 2
    error = capsys.readouterr().err
    assert f"--fix={fixed}: {fixed.partition('=')[0]}: cluster dgx-a100-80 has no known bandwidth" in error
    assert error.count("\n") == 1


def test_the_plan_with_the_least_memory_is_found_where_no_other_fits():
    fixed = f"{FREE},schedule=1f1b"
    least = search(80 * GIB, fixed, objective="memory").plans[0]
    found = search(1.0001 * least.peak, fixed).plans[0]
    assert found.peak <= 1.0001 * least.peak


def test_stages_whose_activations_are_of_very_different_sizes_keep_as_few_as_they_can():
    model = gpt(8, 1024, 16, sequence=512, vocabulary=32000)
    fixed = "pipeline=1,chunks=10,tensor=4,context=1,schedule=interleaved,microbatch_size=4,data_strategy=zero3"
    fixed += ",data_granularity=chunk,offload_states=false"  # embedding and head are stages of their own
    fewest = search(80 * GIB, f"{fixed},recompute=none,offload=0", model=model, batch=8).plans[0]
    found = search(1.002 * fewest.peak, fixed, model=model, batch=8).plans[0]
    assert found.step_seconds <= 1.001 * fewest.step_seconds
