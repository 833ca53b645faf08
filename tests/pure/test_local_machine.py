"""Cluster ``local``: tables of this machine, interpolation, its file, and processes that share cores."""

import json
from dataclasses import replace
from itertools import product

import pytest

from pipeloom import schedules
from pipeloom.cli import main
from pipeloom.errors import InputError
from pipeloom.ir import DataStrategy, Op, Placement
from pipeloom.parallel.inside_stage import InsideStage
from pipeloom.passes import lower
from pipeloom.plan.architecture import Architecture
from pipeloom.plan.cluster import Cluster, Device, NodeLinks, NodeNetwork, parse_cluster
from pipeloom.plan.costs.configuration import Configuration
from pipeloom.plan.costs.cost_model import CostModel
from pipeloom.plan.costs.kernel_times import KernelTimes
from pipeloom.plan.costs.named_clusters import find_cluster
from pipeloom.plan.costs.step_bound import step_bound
from pipeloom.plan.local.layer_times import LayerSeconds, LayerTimes, mean_layers
from pipeloom.plan.local.measured import CURVES, Measured, Rates, interpolated
from pipeloom.plan.local.saved import local_path, notices
from pipeloom.plan.profiled_costs import ProfiledCosts, Unit, UnitRow
from pipeloom.plan.search.answer import row_of, seconds_of
from pipeloom.plan.search.best_first import find_plans
from pipeloom.plan.search.request import Refusals, Request
from pipeloom.plan.search.space.shapes import Shape, Shapes
from pipeloom.plan.stage_times import StageTimes
from pipeloom.sim import Costs, Network, simulate
from pipeloom.sim.data_link import gather_seconds, reduce_seconds
from pipeloom.sim.shared_cores import simulate_shared
from pipeloom.train.machine.measure import SMALL, beyond_kernels

GIGA = 1e9
SIZES = (16.0, 256.0)


def rates(processes, speed=GIGA):
    """Products at `speed` operations per second; curves of 1 ns per byte or operation."""
    grid = tuple((a, b, c, 2 * a * b * c / speed) for a, b, c in product(SIZES, repeat=3))
    curves = dict.fromkeys(CURVES, ((1000.0, 1e-06), (1000000.0, 0.001)))
    seconds = {"kernel": 1e-6, "send": 1e-5, "receive": 1e-5, "collectives": 0.5, "crowding": 1.1}
    return Rates(processes=processes, threads=1, products={"fp32": grid, "bf16": grid}, curves=curves, seconds=seconds)


def machine(**others):
    measured = Measured(
        date="2026-05-04 12:30", machine="node7", cores=2, torch="2.10", rates=(rates(1), rates(2), rates(4))
    )
    device = Device(name="node7", operations_per_second=GIGA, memory_bytes_per_second=GIGA, launch_seconds=1e-6)
    links = NodeLinks(bytes_per_second=GIGA, pair_bytes_per_second=GIGA, latency_seconds=1e-6)
    network = NodeNetwork(bytes_per_second=GIGA, latency_seconds=1e-6)
    cluster = Cluster(
        name="local", devices_per_node=4, device=device, inside_node=links, between_nodes=network, efficiency=1.0
    )
    return replace(cluster, measured=measured, **others)


def model():
    return Architecture(
        name="small", layers=4, width=64, heads=4, key_heads=4, mlp_width=256, vocabulary_size=256, sequence_length=32
    )


def test_times_between_entries_follow_powers():
    curve = ((10.0, 1.0), (1000.0, 100.0))
    assert interpolated(curve, 100.0) == pytest.approx(10.0)
    assert interpolated(curve, 1.0) == 1.0
    assert interpolated(curve, 2000.0) == pytest.approx(200.0)


@pytest.mark.parametrize("size", [(16, 16, 16), (64, 32, 100), (256, 16, 256), (1024, 1024, 512)])
def test_products_of_one_rate(size):
    assert rates(1).product_seconds("fp32", *size) == pytest.approx(2 * size[0] * size[1] * size[2] / GIGA)


def test_a_smaller_product_than_measured_takes_as_long_as_the_smallest():
    assert rates(1).product_seconds("fp32", 1, 16, 16) == pytest.approx(rates(1).product_seconds("fp32", 16, 16, 16))


def test_the_file_is_read_back():
    cluster = machine()
    assert parse_cluster(cluster.to_json()) == cluster


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 7}, "measured.version=7: this release reads version 1. Run `pipeloom doctor --measure` again."),
        ({"rates": []}, r"measured.rates=\[\]: must have an entry"),
        ({"cores": 0}, "measured.cores=0: must be an integer >= 1"),
    ],
)
def test_a_wrong_file_is_refused(change, message):
    data = json.loads(machine().to_json())
    data["measured"] |= change
    with pytest.raises(InputError, match=message):
        parse_cluster(json.dumps(data))


def test_a_grid_with_holes_is_refused():
    data = json.loads(machine().to_json())
    data["measured"]["rates"][0]["products"]["fp32"].pop()
    with pytest.raises(InputError, match=r"products.fp32=.*every combination"):
        parse_cluster(json.dumps(data))


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("device", "operations_per_second", 5e-324),
        ("inside_node", "latency_seconds", 1e300),
        (None, "efficiency", 1e-320),
    ],
)
def test_a_cluster_with_figures_out_of_range_is_refused(section, name, value):
    data = json.loads(machine().to_json())
    (data if section is None else data[section])[name] = value
    with pytest.raises(InputError, match=rf"{name}=\S+: must be .*1e-30"):
        parse_cluster(json.dumps(data))


@pytest.mark.parametrize(
    ("part", "content", "message"),
    [
        ("products", {}, "missing keys 'fp32', 'bf16'"),
        ("curves", {"all_reduce": [[1.0, 1.0]]}, "missing keys 'all_gather', 'message'"),
        ("seconds", {"kernel": 1e-6}, "missing keys 'send', 'receive'"),
        ("curves", {"update": [[2.0, 1.0], [1.0, 2.0]]}, "sizes must ascend"),
    ],
)
def test_tables_that_predictions_need_are_there(part, content, message):
    data = json.loads(machine().to_json())
    data["measured"]["rates"][1][part] = content
    with pytest.raises(InputError, match=message):
        parse_cluster(json.dumps(data))


def test_a_machine_that_is_not_measured_says_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code = main(
        ["simulate", "1f1b", "--ranks", "2", "--microbatches", "2", "--model", "gpt3-175b", "--cluster", "local"]
    )
    assert code == 2
    assert (
        capsys.readouterr()
        .err.strip()
        .endswith(
            "--cluster=local: this machine is not measured yet. Run `pipeloom doctor --measure`, which takes a minute."
        )
    )
    local_path().parent.mkdir()
    local_path().write_text(machine().to_json())
    assert find_cluster("local", "--cluster") == machine()


def test_what_has_changed_since_is_told(monkeypatch):
    monkeypatch.setattr("pipeloom.plan.local.saved.platform.node", lambda: "node7")
    monkeypatch.setattr("pipeloom.plan.local.saved.usable_cores", lambda: 8)
    monkeypatch.setattr("pipeloom.plan.local.saved.torch_version", lambda: "2.10")
    said = notices(machine())
    assert said[0] == "cluster local: measured 2026-05-04 12:30 on node7, 2 cores, torch 2.10"
    assert said[1] == "cluster local: changed since: cores 2 -> 8. Run `pipeloom doctor --measure` again."
    assert len(notices(machine(name="other"))) == 1


def test_kernels_come_from_the_tables():
    kernels = KernelTimes(machine(), 4)
    assert kernels.product(64, 32, 100) == pytest.approx(2 * 64 * 32 * 100 / GIGA)
    assert kernels.elementwise(2e5, 2) == pytest.approx(2 * 1e-4)
    assert kernels.fused_attention(1e5, 1, backward=True) == pytest.approx(1e-4)


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1", "interleaved"])
def test_cores_for_all_ranks_change_nothing(name):
    program = lower(schedules.build(name, num_ranks=3, num_microbatches=6))
    costs, network = Costs.uniform(), Network(latency_seconds=0.1, send_seconds=0.01, receive_seconds=0.02)
    alone, shared = simulate(program, costs, network), simulate_shared(program, costs, network, cores=3)
    assert shared.makespan == pytest.approx(alone.makespan)
    one = simulate_shared(program, costs, Network(), cores=1)
    assert one.makespan == pytest.approx(3 * 6 * 3)  # all work, one computation after the other
    assert shared.makespan < simulate_shared(program, costs, network, cores=2).makespan < one.makespan + 1
    assert simulate_shared(program, costs, network, cores=6, copies=2).makespan == pytest.approx(alone.makespan)
    assert simulate_shared(program, costs, network, cores=3, crowding=2.0).makespan == pytest.approx(alone.makespan)
    assert simulate_shared(program, costs, Network(), cores=1, crowding=1.25).makespan > 1.1 * one.makespan


@pytest.mark.parametrize("degrees", [(4, 1), (2, 2), (1, 4)])
def test_four_processes_on_two_cores(degrees):
    costs, (pipeline, data) = CostModel(model=model(), cluster=machine()), degrees
    of = Configuration(
        pipeline=pipeline, data=data, microbatches=4, precision=replace(Configuration().precision, dtype="fp32")
    )
    step = costs.predict(of).step_seconds
    work = data * 4 * sum(map(sum, costs.stage_seconds(of))) / 2
    assert work < step < 2.5 * work
    assert step_bound(costs, of) <= step


def test_software_counts_beside_kernels():
    """A small GPT whose layers take 1 s longer than their kernels."""
    plain = machine()
    kernels = StageTimes(model=Architecture.of_gpt(SMALL), inside=InsideStage(), cluster=plain, samples=1, element=4)
    forward, inputs, weights = kernels.block()
    found = {"block forward": 1 + forward, "block backward": 1 + inputs + weights, "stage forward": 2.0, "step": 3.0}
    rates = tuple(replace(each, seconds={**each.seconds, **found}) for each in plain.measured.rates)
    rates = tuple(beyond_kernels(plain, rates))
    cluster = replace(plain, measured=replace(plain.measured, rates=rates))
    of = Configuration(precision=replace(Configuration().precision, dtype="fp32"))
    times, before = (CostModel(model=model(), cluster=each).costs(of) for each in (cluster, plain))
    assert times.forward[0] == pytest.approx(before.forward[0] + 4 * 1 + 2)
    assert times.backward[0] == pytest.approx(before.backward[0] + 4 * 1)
    steps = [CostModel(model=model(), cluster=each).update_seconds(of, [[0]]) for each in (cluster, plain)]
    assert steps[0] == pytest.approx(steps[1] + 3)


def test_crowding_is_how_much_slower_the_same_layers_are():
    block = LayerSeconds((1.0, 0.0, 2.0), (3.0, 4.0, 5.0), {False: (1.0, 2.0, 3.0)})
    crowded = block._replace(blocks={False: (1.5, 2.5, 3.5)})
    alone, both = LayerTimes(element=4, rows={1: block, 2: block}), LayerTimes(element=4, rows={2: crowded})
    assert alone.beside(both).crowding == pytest.approx(1.25)
    assert LayerTimes.from_mapping(json.loads(json.dumps(alone.beside(both).to_mapping()))) == alone.beside(both)
    costs = CostModel(model=model(), cluster=machine(), measured=alone)
    of = Configuration(pipeline=4, microbatches=8, precision=replace(Configuration().precision, dtype="fp32"))
    slower = replace(costs, measured=alone.beside(both))
    assert 1.01 < slower.predict(of).timeline.makespan / costs.predict(of).timeline.makespan < 1.25


def test_gradients_are_copied_before_they_are_reduced():
    costs = CostModel(model=model(), cluster=machine())
    of = Configuration(data=2, precision=replace(Configuration().precision, dtype="fp32"))
    (seconds,) = costs.costs(of).other[Op.REDUCE_GRAD]
    assert seconds == pytest.approx(4 * costs.costs(of).gradient_bytes[0] * 1e-9)  # two kernels, each of 1 ns per byte


def test_measured_layers_replace_predicted_ones():
    row = LayerSeconds((1.0, 0.0, 2.0), (3.0, 4.0, 5.0), {False: (6.0, 7.0, 8.0)}, split=1.5, head_split=1.5)
    times = LayerTimes(element=4, rows={2: row})
    costs = CostModel(model=model(), cluster=machine(), measured=times)
    fp32 = replace(Configuration().precision, dtype="fp32")
    of = Configuration(microbatch_size=2, precision=fp32)
    assert costs.stage_seconds(of) == [pytest.approx((1 + 4 * 6 + 3, 4 * 7 + 4, 2 + 4 * 8 + 5))]
    assert costs.costs(of).backward_input == pytest.approx((1.5 * 32,))
    assert costs.costs(of).backward == pytest.approx((71.0,))
    bigger = costs.stage_seconds(of._replace(microbatch_size=4))[0]
    assert 1.5 * 28 < bigger.forward < 2.5 * 28


def test_a_split_backward_of_the_head_costs_what_was_measured_of_it():
    row = LayerSeconds((1.0, 0.0, 2.0), (3.0, 4.0, 5.0), {False: (6.0, 7.0, 8.0)}, split=1.5, head_split=1.1)
    times = LayerTimes(element=4, rows={2: row})
    assert LayerTimes.from_mapping(json.loads(json.dumps(times.to_mapping()))) == times
    assert mean_layers([times, times]) == times
    costs = CostModel(model=model(), cluster=machine(), measured=times)
    fp32 = replace(Configuration().precision, dtype="fp32")
    found = costs.costs(Configuration(pipeline=2, microbatches=2, microbatch_size=2, precision=fp32))
    blocks = 1.5 * 2 * (7 + 8)
    halves = [sum(each) for each in zip(found.backward_input, found.backward_weight, strict=True)]
    assert halves == pytest.approx([blocks + 1.5 * 2, blocks + 1.1 * (4 + 5)])


def profiled(split: float = 1.0) -> ProfiledCosts:
    """Four equal units, whose backward in halves takes `split` times as long as in one."""
    row = UnitRow(
        forward=1e-3, backward=2e-3, inputs=split * 1e-3, weights=split * 1e-3, again=0.0, sent=1024.0, kept=1.0,
        recomputed=1.0,
    )  # fmt: skip
    units = [Unit(name=f"{at}", rows={1: row}, parameters={f"{at}": (1000, 1000)}) for at in range(4)]
    return ProfiledCosts(units=units, cluster=machine())


def makespan(costs: ProfiledCosts, schedule: str) -> float:
    of = Configuration(pipeline=2, microbatches=4, schedule=schedule)
    return costs.timeline(of, costs.program(of)).makespan


def test_a_profile_knows_what_it_takes_to_split_a_backward():
    plain, slower = profiled(), profiled(1.5)
    for name in ("1f1b", "gpipe"):
        assert makespan(plain, name) == pytest.approx(makespan(slower, name))
    assert makespan(slower, "zb-h1") > 1.2 * makespan(plain, "zb-h1")


def test_stages_that_two_ranks_hold_exchange_and_add_their_gradients():
    of, costs = Configuration(pipeline=2, microbatches=4, schedule="dualpipe"), profiled()
    assert costs.shared_sum_seconds(of, costs.program(of._replace(schedule="1f1b")).placement) == 0.0
    size = 4e6 * 4  # bytes of all four units, which both ranks hold
    sums = KernelTimes(machine(), 4).elementwise(3 * size, 1)
    assert costs.shared_sum_seconds(of, costs.program(of).placement) == pytest.approx(sums + size * 1e-9, rel=0.01)


def quick_messages():
    """A machine whose messages take a tenth of the seconds of collectives."""
    curve = {"message": ((1000.0, 1e-7), (1000000.0, 1e-4))}
    measured = machine().measured
    rates = tuple(replace(each, curves={**each.curves, **curve}) for each in measured.rates)
    return replace(machine(), measured=replace(measured, rates=rates))


def test_bounds_of_data_links_know_which_strategies_read_in_place():
    request = Request(devices=2, batch_size=2)
    precision = replace(Configuration().precision, dtype="fp32")  # no master parameters
    shape = Shape(Configuration(data=2, precision=precision), Placement.loop(1, 1), split=False)
    ways = [shape.of._replace(strategy=each) for each in DataStrategy]

    def bounds(*ways):
        return Shapes(CostModel(model=model(), cluster=quick_messages()), request, Refusals()).link_bounds(shape, ways)

    apart = [bounds(way)[0] for way in ways]
    assert bounds(*ways) == apart
    assert bounds(*reversed(ways)) == apart[::-1]
    by_strategy = dict(zip(DataStrategy, apart, strict=True))
    assert by_strategy[DataStrategy.ZERO3] < by_strategy[DataStrategy.ZERO2]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_replicas_of_one_machine_exchange_through_shared_memory(dtype):
    costs = CostModel(model=model(), cluster=quick_messages())
    of = Configuration(data=2, precision=replace(Configuration().precision, dtype=dtype))
    gathers, sums = {}, {}
    for strategy in DataStrategy:
        each = of._replace(strategy=strategy)
        network, data = costs.network(each), each.data_axis()
        gathers[strategy], sums[strategy] = (form(data, 1e8, network) for form in (gather_seconds, reduce_seconds))
    with_zero = [DataStrategy.ZERO1, DataStrategy.ZERO2, DataStrategy.ZERO3]
    for strategy in with_zero:  # half of the bytes, in place of all of them
        assert sums[strategy] == pytest.approx(5e-3, rel=0.01)
        assert sums[strategy] < sums[DataStrategy.DDP] / 9
    if dtype == "fp32":
        assert gathers.pop(DataStrategy.ZERO3) == pytest.approx(1e-7)  # in place
    assert all(gathers[strategy] > 0.04 for strategy in with_zero if strategy in gathers)


def test_half_precision_without_times_is_no_plan_and_the_peak_is_that_of_the_format():
    costs = CostModel(model=model(), cluster=machine())
    request = Request(devices=2, batch_size=8, memory_bytes=1e12, fixed={"precision": "fp16"}, optimizer="adamw")
    with pytest.raises(InputError, match="precision=fp16: cluster local has no times of it"):
        find_plans(costs, request)
    of = find_plans(costs, replace(request, fixed={"precision": "bf16"}, top=1)).plans[0]
    row = row_of(costs, of)
    products = costs.cluster.beside(of.of.devices).rates.products
    peak = max(2 * a * b * c / seconds for a, b, c, seconds in products.get("bf16", products["fp32"]))
    rate = costs.operations(of.of) / of.step_seconds / of.of.devices
    assert row["model_flops_utilization"] == pytest.approx(rate / peak)
    assert row["model_flops_utilization"] < 1


def test_parts_of_a_step_add_up_where_processes_that_exchange_compute_more_slowly():
    costs = CostModel(model=model(), cluster=machine())
    fixed = {"pipeline": 1, "data": 2}
    request = Request(devices=2, batch_size=8, memory_bytes=1e12, fixed=fixed, optimizer="adamw", top=8)
    for found in find_plans(costs, request).plans:
        # Computations that are longer beside an exchange leave less of the step to the exchange, here nothing.
        for busy in (found.busy_seconds, found.step_seconds - found.update_seconds, found.step_seconds):
            parts = seconds_of(costs, replace(found, busy_seconds=busy))
            assert sum(parts.values()) == pytest.approx(found.step_seconds)
            assert min(parts.values()) >= 0
