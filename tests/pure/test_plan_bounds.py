"""Lower bounds of the search for plans: no configuration that is simulated takes less time or memory."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import median

import pytest

from pipeloom.errors import PipeloomError
from pipeloom.ir import Op, Placement
from pipeloom.ir.data_axis import DataStrategy, Granularity
from pipeloom.ir.recompute import Recompute
from pipeloom.parallel.expert.sizes import ExpertSizes
from pipeloom.parallel.inside_stage import InsideStage
from pipeloom.plan.architecture import Architecture
from pipeloom.plan.costs.configuration import Configuration
from pipeloom.plan.costs.cost_model import CostModel
from pipeloom.plan.costs.named_clusters import CLUSTERS
from pipeloom.plan.costs.step_bound import busy_links, message_seconds, pipeline_bound
from pipeloom.plan.search.best_first import find_plans
from pipeloom.plan.search.memory.live_moments import moments_of
from pipeloom.plan.search.memory.memory_choice import Choice, MemoryChoices
from pipeloom.plan.search.memory.offload_bound import offloaded_of
from pipeloom.plan.search.memory.stage_bytes import KnownBytes
from pipeloom.plan.search.request import Refusals, Request, parse_fixed
from pipeloom.plan.search.short_steps import order_number
from pipeloom.plan.search.simulated import Step, Steps, simulated
from pipeloom.plan.search.space.data_runs import data_runs
from pipeloom.plan.search.space.shapes import Shape, candidate_seconds, pipeline_seconds
from pipeloom.plan.search.space.space import Space
from pipeloom.plan.search.space.ways import Way
from tests.pure.published_runs import cost_model, gpt

GIB = 2.0**30
MOST_ACTIONS = 1500  # of a simulated step


def random_model(rng: random.Random) -> Architecture:
    heads = rng.choice([4, 8, 16])
    width = 64 * heads * rng.choice([1, 2])
    experts = ExpertSizes(experts=rng.choice([4, 8]), top_k=2, expert_width=2 * width, gated=True)
    return Architecture(
        name="random", layers=rng.choice([4, 6, 8, 12]), width=width, heads=heads,
        key_heads=heads // rng.choice([1, 2, 4]), mlp_width=rng.choice([3, 4]) * width, gated=rng.random() < 0.5,
        vocabulary_size=rng.choice([1000, 32000, 250000]), sequence_length=rng.choice([512, 2048, 8192]),
        tie_embeddings=rng.random() < 0.5, experts=experts if rng.random() < 0.3 else None,
    )  # fmt: skip


def some(items, number: int, rng: random.Random) -> list:
    found = list(items)
    return rng.sample(found, min(number, len(found)))


def samples(space: Space, costs: CostModel, request: Request, rng: random.Random):
    """Random configurations: seconds of their group, way, shape, choice, and simulated step."""
    for group, devices in some(space.groups.found(), 3, rng):
        for mesh in some(space.meshes(group, devices), 2, rng):
            ways = list(space.ways(mesh))
            for shape in some(space.shapes.found(mesh), 2 if ways else 0, rng):
                for way in some(ways, 1, rng):
                    yield space.group_bound(group, devices), way, shape, choices_of(costs, request, shape, way, rng)


def choices_of(costs: CostModel, request: Request, shape: Shape, way: Way, rng: random.Random) -> list[Choice]:
    try:
        memory = MemoryChoices(costs, shape, moments_of(shape.of, merged=costs.merges_backwards), request)
    except PipeloomError:
        return []
    given = {key: getattr(way.of, key) for key in ("strategy", "granularity", "offload_states")}
    of = shape.of._replace(**given)
    offloaded = memory.offloaded(of, every=True).values()
    return [*memory.found(of, every=True), *(choice for each in offloaded for choice in some(each, 1, rng))]


@pytest.mark.parametrize("seed", range(2))
def test_bounds_are_never_above_what_is_simulated(seed):
    rng, simulated, offloaded, shares = random.Random(seed), 0, 0, list[float]()
    while simulated < 60 or offloaded < 5:
        costs = CostModel(model=random_model(rng), cluster=CLUSTERS[rng.choice(["p3.16xlarge", "dgx-a100-80"])])
        request = Request(
            devices=rng.choice([2, 4, 6, 8, 12, 16]),
            batch_size=rng.choice([8, 16, 24, 48]),
            memory_bytes=GIB * rng.choice([2, 4, 8, 80]),
            fixed=rng.choice([{}, {}, {"order": ("tp", "pp", "cp", "dp")}]),
        )
        space, known = Space(costs, request, Refusals(), lambda _: None), KnownBytes()
        for of_group, way, shape, choices in samples(space, costs, request, rng):
            for choice in some(choices, 2, rng):
                try:
                    step = Step(Steps(costs), choice.of, choice.schedule_limit)
                    if step.actions > MOST_ACTIONS:
                        continue
                    found = step.simulated(step.peaks())
                except PipeloomError:
                    continue
                simulated += 1
                timeline = found.timeline if simulated <= 10 else None
                if timeline is not None and timeline.num_microbatches == choice.of.microbatches:
                    assert found.makespan == timeline.makespan
                    assert found.busy_seconds == pytest.approx(timeline.ideal_seconds)
                    assert found.peak_bytes == pytest.approx(costs.peak_bytes(choice.of))
                update = costs.update_seconds(choice.of, shape.placement.stages_of)
                least, likely = candidate_seconds(costs, shape._replace(of=choice.of))
                of_way = space.shapes.link_bounds(shape, [way.of])[0]
                bounds = [of_group, space.shapes.bound(shape), of_way, least + update]
                offloads = choice.of.offload is not None
                if found.peak <= request.memory_bytes:
                    bounds.append(way.offloaded if offloads else way.seconds)
                if offloads:
                    offloaded += 1
                    bounds.append(offloaded_of(costs, choice.of, shape.placement.stages_of).seconds)
                assert max(bounds) <= found.step_seconds * (1 + 1e-9), choice.of
                assert least <= likely
                assert choice.least_bytes <= found.peak * (1 + 1e-9), choice.of
                assert way.peak <= found.peak * (1 + 1e-9), choice.of
                assert known.of_head(costs, way.of, request.kinds, choice.of.slices) <= found.peak
                of = choice.of._replace(recompute=Recompute.NONE, offload=None)
                stages, peak = known.of(costs, shape), found.peak * (1 + 1e-9)
                assert stages.may_fit(of, request.kinds, peak, offloads=offloads)
                assert way.states <= stages.most_states(of, request.kinds, peak)
                assert way.states <= known.most_states(costs, of, request.kinds, of.slices, peak)
                if not offloads:
                    shares.append(choice.least_bytes / found.peak)
    assert median(shares) > 0.99  # with little memory, few configurations that do not fit are simulated


@pytest.mark.parametrize("seed", [20, 24, pytest.param(28, marks=pytest.mark.whole_grid), 30])
def test_with_little_memory_a_search_finds_what_all_configurations_have(seed):
    """Where the first choice does not fit by far, the next one may be far slower than those behind it."""
    rng = random.Random(seed)
    costs = CostModel(model=random_model(rng), cluster=CLUSTERS[rng.choice(["p3.16xlarge", "dgx-a100-80"])])
    fixed = f"context=1,slices=1,tensor=1,pipeline={rng.choice([2, 4])},microbatch_size={rng.choice([1, 2])}"
    if rng.random() < 0.5:
        fixed += f",schedule={rng.choice(['1f1b', 'interleaved', 'gpipe', 'zb-v', 'v-half', 'bfs', 'zb-h1'])}"
    if rng.random() < 0.5:
        fixed += ",offload_states=false,offload=none"
    request = Request(devices=8, batch_size=16, fixed=parse_fixed(fixed), top=1)
    least = find_plans(costs, replace(request, objective="memory")).plans[0].peak
    most = max(find_plans(costs, request).plans[0].peak, least)
    short = replace(request, memory_bytes=least + (most - least) * rng.choice([0.05, 0.15, 0.3, 0.5, 0.7, 0.9]) + 1)
    best, every = (find_plans(costs, short, exhaustive=exhaustive).plans[0] for exhaustive in (False, True))
    assert best.peak <= short.memory_bytes
    assert best.step_seconds <= 1.01 * every.step_seconds


@pytest.mark.parametrize("granularity", [Granularity.CHUNK, Granularity.MICROBATCH])
@pytest.mark.parametrize(
    ("schedule", "pipeline", "chunks", "microbatches", "slices"),
    [
        ("interleaved", 1, 4, 6, 1),
        ("interleaved", 4, 3, 1600, 1),  # whose short step stands for it
        ("seq1f1b-interleaved", 2, 2, 8, 2),
        ("bfs", 4, 2, 8, 1),
        ("zb-v", 4, 2, 12, 1),
        ("dualpipe", 4, 1, 16, 1),
        ("chimera", 4, 1, 8, 1),
    ],
)
def test_ranks_gather_and_reduce_their_stages_as_often_as_their_programs(
    schedule, pipeline, chunks, microbatches, slices, granularity
):
    costs = cost_model(gpt(16, 512, 8, sequence=2048), "dgx-a100-80", "pipeloom")
    of = Configuration(
        schedule=schedule, pipeline=pipeline, chunks=chunks, microbatches=microbatches, slices=slices, data=2,
        strategy=DataStrategy.ZERO3, granularity=granularity,
    )  # fmt: skip
    program = costs.program(of, costs.schedule(of))
    for rank, held in enumerate(program.placement.stages_of):
        for stage, runs in zip(held, data_runs(of, program.placement)[rank], strict=True):
            of_stage = [action for action in program.orders[rank] if action.stage == stage]
            gathers = [action for action in of_stage if action.op is Op.UNSHARD]
            sums = [action for action in of_stage if action.op is Op.REDUCE_GRAD and action.microbatch is not None]
            assert runs == (len(gathers), len(sums)), stage


@pytest.mark.parametrize(("data", "strategy"), [(4, DataStrategy.ZERO1), (8, DataStrategy.DDP)])
def test_the_bound_of_data_links_is_exact_on_one_rank(data, strategy):
    """One micro-batch whose gathers and reductions no other computation hides."""
    costs = cost_model(gpt(4, 2048, 16, sequence=256), "p3.16xlarge", "pipeloom")
    of = Configuration(data=data, strategy=strategy)
    shape = Shape(of, Placement.loop(1, 1), split=False)
    least, _ = candidate_seconds(costs, shape)
    assert least == pytest.approx(simulated(costs, of).makespan)
    assert least > 1.05 * pipeline_seconds(costs, shape)


def test_schedules_with_the_same_order_are_simulated_once():
    def number(schedule: str, microbatches: int) -> int | None:
        return order_number(Configuration(schedule=schedule, pipeline=4, chunks=1, microbatches=microbatches))

    assert number("zb-h1", 1) == number("zb-h2", 1)
    assert number("zb-h1", 8) != number("zb-h2", 8)
    assert number("zb-h1", 10_000) is None, "a short step stands for it"
    assert number("zb-auto", 1) is None, "its order follows from costs"


def test_the_data_link_counts_however_costs_list_the_degrees_of_experts():
    class Listed(CostModel):
        @property
        def expert_degrees(self):
            return tuple(super().expert_degrees)

    request, known = Request(devices=64, batch_size=64), []
    for kind in (CostModel, Listed):
        costs = kind(model=gpt(4, 2048, 16, sequence=256), cluster=CLUSTERS["p3.16xlarge"])
        space = Space(costs, request, Refusals(), lambda _: None)
        known.append([way.seconds for way in space.ways(Configuration(data=64))])
    assert known[0] == known[1]


def test_the_busiest_link_bounds_a_step():
    """Messages of many virtual stages between two nodes take longer than computations."""
    costs = cost_model(gpt(8, 1024, 16, sequence=2048), "p3.16xlarge", "pipeloom")
    of = Configuration(
        schedule="interleaved", pipeline=2, chunks=4, microbatches=16, microbatch_size=4, blocks=(1,) * 8,
        inside=InsideStage(tensor=8),
    )  # fmt: skip
    placement = Placement.loop(2, 4)
    step = simulated(costs, of).makespan
    work = pipeline_bound(costs.stage_seconds(of), placement, 16, message_seconds(costs, of), split=False)
    assert work < 0.8 * step
    assert 0.9 * step < busy_links(costs, of, placement) <= step
