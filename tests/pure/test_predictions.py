"""Predictions of published runs, single kernels, links and lower bounds."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pipeloom import schedules
from pipeloom.cli import main
from pipeloom.ir import check
from pipeloom.ir.recompute import Recompute
from pipeloom.parallel.inside_stage import InsideStage
from pipeloom.plan.costs.configuration import Configuration
from pipeloom.plan.costs.kernel_times import KernelTimes
from pipeloom.plan.costs.links import pipeline_network
from pipeloom.plan.costs.named_clusters import CLUSTERS
from pipeloom.plan.costs.software import SOFTWARE
from pipeloom.plan.costs.step_bound import step_bound
from pipeloom.plan.memory import transformer_layers
from pipeloom.plan.named_architectures import NAMED
from pipeloom.sim.network import Link
from tests.pure import published_runs
from tests.pure.predictions_page import PAGE, row
from tests.pure.published_runs import Run, cost_model, gpt
from tests.pure.published_zero_bubble import zero_bubble

A100 = CLUSTERS["dgx-a100-80"]


def off(runs: list[Run]) -> dict[str, float]:
    """Predicted over measured seconds, less one."""
    return {run.name: run.predicted() / run.seconds - 1 for run in runs}


def same_order(runs: list[Run]) -> bool:
    by_measured = sorted(runs, key=lambda run: run.seconds)
    return by_measured == sorted(runs, key=lambda run: run.predicted())


def test_weak_scaling_within_8_percent():
    found = off([run for run in published_runs.weak_scaling() if run.of.pipeline < 35])
    assert max(map(abs, found.values())) < 0.08, found


@pytest.mark.whole_grid
@pytest.mark.parametrize("table", [published_runs.weak_scaling, published_runs.recomputation])
def test_megatrons_tables_within_8_percent(table):
    found = off(table())
    assert max(map(abs, found.values())) < 0.08, found


def test_more_replicas_within_8_percent_and_in_order():
    runs = published_runs.more_replicas()[1:]
    found = off(runs)
    assert max(map(abs, found.values())) < 0.08, found
    assert same_order(runs)


def test_recomputation_within_8_percent_and_selective_is_faster():
    runs = [run for run in published_runs.recomputation() if run.of.pipeline < 35]
    found = off(runs)
    assert max(map(abs, found.values())) < 0.08, found
    assert same_order(runs[:2])


def test_the_micro_batch_sizes_of_a_gpt_within_8_percent_and_in_order():
    runs = published_runs.microbatch_sizes()[:4]
    found = off(runs)
    assert max(map(abs, found.values())) < 0.08, found
    assert same_order(runs)


def test_runs_on_the_network_of_their_site_within_8_percent():
    runs = [run for run in published_runs.on_its_network() if run.name.endswith("after")]
    found = off(runs)
    assert max(map(abs, found.values())) < 0.08, found


def test_layouts_of_gpt_xl_are_in_order_with_kernels_and_overlap_of_pipeloom():
    """Messages of one stage per node, in both directions, fill the network."""
    found = []
    for run in published_runs.layouts()[:4]:
        cut = run.of.inside.tensor > 1 and run.of.pipeline > 1
        of = run.of._replace(inside=InsideStage(tensor=run.of.inside.tensor, sequence=cut))
        found.append(replace(run, of=of, software="pipeloom"))
    assert same_order(found)


def test_both_directions_of_a_device_share_its_card():
    def links(name: str, stride: int) -> tuple[Link, ...]:
        return pipeline_network(CLUSTERS[name], ranks=4, stride=stride).links

    assert {link.ranks for link in links("dgx-a100-80", 8)} == {
        frozenset({(rank, (rank + 1) % 4), (rank, (rank - 1) % 4)}) for rank in range(4)
    }
    assert {link.ranks for link in links("dgx-a100-80", 4)} == {
        frozenset({pair}) for pair in ((1, 2), (2, 1), (3, 0), (0, 3))
    }
    assert {link.ranks for link in links("p3.16xlarge", 4)} == {
        frozenset({(1, 2), (0, 3)}),
        frozenset({(2, 1), (3, 0)}),
    }
    assert not links("p3.16xlarge", 2)


def test_layouts_of_gpt_xl_within_8_percent_and_in_order():
    runs = published_runs.layouts()
    found = off(runs)
    assert max(map(abs, found.values())) < 0.08, found
    for layers in ("24", "32", "40"):
        assert same_order([run for run in runs if run.name.startswith(layers)])


def test_zero_bubbles_tables_within_8_percent_and_in_order():
    runs = [run for run in zero_bubble() if run.of.pipeline == 8]
    found = off(runs)
    assert max(map(abs, found.values())) < 0.08, found
    for name in ("1.5B", "6.2B"):
        assert same_order([run for run in runs if run.name.startswith(name) and run.of.microbatches == 24][:4])


def test_llama_within_8_percent():
    found = off(published_runs.llama())
    assert max(map(abs, found.values())) < 0.08, found


def test_the_page_has_what_is_predicted_now():
    runs = [*published_runs.weak_scaling()[:8], *published_runs.layouts(), *published_runs.llama()]
    text = PAGE.read_text(encoding="utf-8")
    stale = [run.name for run in runs if row(run) not in text]
    assert not stale, f"run python -m tests.pure.predictions_page: {stale}"


@pytest.mark.parametrize(
    ("recompute", "sequence", "gib"), [(Recompute.NONE, False, 59.25), (Recompute.SELECTIVE, True, 9.5625)]
)
def test_activations_of_the_22b_model(recompute, sequence, gib):
    """arXiv:2205.05198, equations 2 and 6."""
    layers = transformer_layers(
        gpt(48, 6144, 64), 4, 2, InsideStage(tensor=8, sequence=sequence), software=SOFTWARE["megatron-2022"]
    )
    blocks = sum(layer.kept_bytes[recompute] for layer in layers if layer.is_block)
    assert blocks / 2**30 == pytest.approx(gib, rel=0.001)
    assert sum(layer.kept_bytes[recompute] for layer in layers) / 2**30 == pytest.approx(gib, rel=0.03)


def test_products_take_whole_waves():
    plain = replace(A100, efficiency=1.0, device=replace(A100.device, launch_seconds=0.0))
    product = KernelTimes(plain, 2).product
    wave = product(256 * 12, 128 * 9, 2**16)  # 108 tiles
    assert wave == pytest.approx(2 * 256 * 12 * 128 * 9 * 2**16 / 312e12, rel=0.002)
    assert product(256 * 12, 128 * 18, 2**16) == pytest.approx(2 * wave, rel=0.001)
    assert product(256 * 12, 128 * 9 + 64, 2**16) > 1.1 * wave
    assert product(256 * 12, 128 * 9, 2**16 + 4) == pytest.approx(2.5 * wave, rel=0.001)  # not aligned
    few, many = (product(size, size, size) / size**3 for size in (256, 8192))
    assert few > 3 * many


def test_a_product_takes_its_memory_traffic():
    moved = KernelTimes(A100, 2).product(8, 4096, 4096) - A100.device.launch_seconds
    assert moved == pytest.approx(2 * (4096**2 + 2 * 8 * 4096) / A100.memory_rate)


def test_larger_micro_batches_take_less_per_sample():
    times = [
        sum(cost_model(gpt(8, 13824, 64), "dgx-a100-80", "pipeloom").times(
            Configuration(microbatch_size=size, inside=InsideStage(tensor=8)), Recompute.FULL
        ).block()) / size
        for size in (1, 2, 4)
    ]  # fmt: skip
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize("name", [name for name, family in schedules.SYNCHRONOUS.items() if name != "naive"])
def test_no_schedule_is_faster_than_the_bound(name):
    family = schedules.find(name)
    ranks, model = 4, gpt(18, 1024, 16, sequence=512, vocabulary=32000)
    slices = 4 if family.sliced else 1
    chunks = family.default_chunks
    for microbatches, size, order in ((8, 1, ("dp", "pp", "cp", "tp")), (12, 4, ("pp", "dp", "cp", "tp"))):
        of = Configuration(
            schedule=name, pipeline=ranks, chunks=chunks, microbatches=microbatches, microbatch_size=size,
            slices=slices, data=4, order=order,
        )  # fmt: skip
        costs = cost_model(model, "dgx-a100-80", "pipeloom")
        plan = family(num_ranks=ranks, num_microbatches=microbatches, num_slices=slices, conditions=None)
        of = of._replace(chunks=plan.num_stages // ranks) if plan.num_stages >= ranks else of
        schedule = costs.schedule(of) if family.to_measure else plan
        check(schedule)
        found = costs.predict(of, costs.program(of, schedule))
        bound = step_bound(costs, of, schedule)
        assert 0.4 * found.step_seconds < bound <= found.step_seconds * (1 + 1e-9)


def test_a_model_on_a_named_cluster(capsys):
    words = "--ranks 8 --microbatches 16 --model gpt3-175b --cluster dgx-h200 --tensor 8 --json"
    assert main(["simulate", "1f1b", *words.split()]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert 0.6 * answer["step_seconds"] < answer["least_step_seconds"] <= answer["step_seconds"]
    more = ["--software", "megatron-2022", "--order", "pp,dp,tp", "--blocks", "11,12,12,12,12,12,13,12"]
    assert main(["simulate", "1f1b", *words.split(), *more]) == 0
    other = json.loads(capsys.readouterr().out)
    assert other["memory"][0]["activations"] > 1.8 * answer["memory"][0]["activations"]  # scores


def test_costs_of_a_configuration_are_counted_in_closed_form():
    """The layers' costs once, then sums: many configurations per second."""
    costs, of = cost_model(NAMED["gpt3-175b"], "dgx-a100-80", "pipeloom"), Configuration(pipeline=8, microbatches=8)
    first = costs.stage_seconds(of)
    assert costs.stage_seconds(of._replace(microbatches=64, data=4)) == first
    assert len(costs._layers) == 1
