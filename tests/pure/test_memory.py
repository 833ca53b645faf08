"""Bytes of every rank in closed form: states of ZeRO, walks over programs worked by hand, choices under a cap."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from pipeloom import schedules as families
from pipeloom.errors import InputError
from pipeloom.ir import DataAxis, DataStrategy, Granularity, Program, Schedule
from pipeloom.ir.recompute import Recompute
from pipeloom.models.gpt_config import GPTConfig
from pipeloom.parallel import Precision
from pipeloom.passes import insert_offload, lower
from pipeloom.plan.memory import (
    KINDS,
    LayerMemory,
    MemoryModel,
    MemoryRow,
    choose_memory,
    gpt_layers,
    in_stages,
    memory_of_ranks,
    read_memory,
    write_memory,
)
from pipeloom.plan.memory.backward_bytes import BackwardMoment
from pipeloom.plan.memory.choose import stage_bytes
from pipeloom.plan.memory.state_bytes import NumberBytes, state_elements, unit_bytes
from pipeloom.sim import Costs, Network, simulate

BF16_SAME = Precision("bf16", "same")
FP32 = NumberBytes.of(Precision())
STRATEGIES = list(DataStrategy)


def layer(name: str, parameters: int, kept: float, *, block: bool = True) -> LayerMemory:
    """One vector of parameters; selective keeps half, full a tenth, and computes again a quarter and all."""
    return LayerMemory(
        name=name,
        parameters={f"{name}.weight": (parameters,)},
        kept_bytes=dict(zip(Recompute, (kept, kept / 2, kept / 10), strict=True)),
        is_block=block,
        recompute_share=dict(zip(Recompute, (0.0, 0.25, 1.0), strict=True)),
    )


def model(stages: int, layers: int = 1, parameters: int = 160, kept: float = 1000.0, **more) -> MemoryModel:
    made = [[layer(f"{s}.{n}", parameters, kept) for n in range(layers)] for s in range(stages)]
    return MemoryModel(stages=made, **more)


def one_rank(data: DataAxis | None, microbatches: int = 2, chunks: int = 1) -> Program:
    """Of one rank: all forwards of a chunk, then those of the next; the backwards the other way."""
    return lower(families.build("bfs", num_ranks=1, num_microbatches=microbatches, num_chunks=chunks), data=data)


def states(strategy: DataStrategy, degree: int, optimizer: str = "adamw") -> float:
    """Bytes a parameter with 16-bit parameters and gradients, all of them reduced."""
    unit = unit_bytes(
        {"w": (1024, 1024)},
        data=DataAxis(degree=degree, strategy=strategy, separate_master=True),
        formats=NumberBytes.of(BF16_SAME),
        optimizer=optimizer,
        in_blocks={"w"},
    )
    return (unit.parameters + unit.masters + unit.optimizer + unit.reduced) / 2**20


@pytest.mark.parametrize("degree", [1, 4, 64])
def test_states_are_those_of_the_zero_paper(degree):
    """arXiv:1910.02054, section 5: 16 bytes a parameter, of which 12 and then 14 are shared by N copies.

    Its zero1 keeps whole gradients to the end, where here every copy then has its part of their sums; its zero3 keeps
    16-bit shards beside the masters, where here they are made when they are gathered.
    """
    n = degree
    assert states(DataStrategy.DDP, n) == 16
    assert states(DataStrategy.ZERO1, n) == states(DataStrategy.ZERO2, n) == 2 + 14 / n
    assert states(DataStrategy.ZERO3, n) == 16 / n - 2 / n
    assert states(DataStrategy.PARAMETER_SERVER, n) == 16
    for optimizer, total in (("sgd", 8), ("momentum", 12), ("lion", 12), ("adam", 16), ("amsgrad", 20), ("muon", 12)):
        assert states(DataStrategy.DDP, n, optimizer) == total


def test_a_server_holds_what_the_others_do_not():
    axis = DataAxis(degree=4, strategy=DataStrategy.PARAMETER_SERVER)
    server, other = (memory_of_ranks(one_rank(axis), model(1), replica=replica)[0] for replica in (0, 3))
    assert (server.kinds["optimizer"], other.kinds["optimizer"]) == (8 * 160, 0)
    assert server.kinds["parameters"] == other.kinds["parameters"] == 4 * 160


def test_states_of_optimizers_by_shape():
    for shape in ((6, 10), (7,)):
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        for name, numbers in (("sgd", 0), ("momentum", 1), ("lion", 1), ("adamw", 2), ("amsgrad", 3)):
            assert state_elements(name, shape, in_block=True) == numbers * count
    assert state_elements("adafactor", (6, 10), in_block=True) == 16
    assert state_elements("muon", (6, 10), in_block=True) == 60
    assert state_elements("muon", (6, 10), in_block=False) == state_elements("muon", (60,), in_block=True) * 1 == 120
    with pytest.raises(InputError, match=r"optimizer='adm': unknown optimizer\. Use one of sgd, "):
        state_elements("adm", (1,), in_block=False)


def test_pieces_are_padded_so_that_copies_have_equal_ones():
    """100 numbers lie in 112 of aligned memory; three segments of 48 hold them, the last one only 4."""
    data = DataAxis(degree=3, strategy=DataStrategy.ZERO3)
    sizes = [
        unit_bytes({"w": (100,)}, data=data, formats=FP32, optimizer="adam", in_blocks=(), replica=c) for c in range(3)
    ]
    assert [(unit.parameters, unit.masters) for unit in sizes] == [(0, 4 * 48)] * 3
    assert [unit.gathered for unit in sizes] == [4 * 144] * 3
    assert [unit.optimizer for unit in sizes] == [8 * 48, 8 * 48, 8 * 4]


def test_whole_parameters_go_where_least_is():
    data = DataAxis(degree=2, strategy=DataStrategy.ZERO1)
    shapes = {"a": (16, 4), "b": (16, 2), "c": (16, 2)}
    for replica, states_of in ((0, 64), (1, 64)):
        unit = unit_bytes(
            shapes,
            data=data,
            formats=FP32,
            optimizer="momentum",
            in_blocks=shapes,
            replica=replica,
            loads=[0, 0],
        )
        assert unit.optimizer == 4 * states_of


def test_a_rank_alone_holds_parameters_gradients_states_and_its_activations():
    """Three micro-batches of a stage of two layers, 160 parameters and 1000 bytes each. The first backward starts with
    all activations and no gradients; it makes those of a layer, 640 bytes, while 1000 bytes of activations go."""
    (held,) = memory_of_ranks(one_rank(None, 3), model(1, layers=2))
    assert held.kinds == dict.fromkeys(KINDS, 0.0) | {
        "parameters": 4 * 320,
        "gradients": 4 * 320,
        "optimizer": 8 * 320,
        "activations": 3 * 2000,
    }
    assert held.peak == 12 * 320 + 3 * 2000
    (held,) = memory_of_ranks(one_rank(None, 3), model(1, layers=2, parameters=320))  # the second layer makes 1280
    assert held.peak == 12 * 640 + 3 * 2000 - 2000 + 4 * 640


@pytest.mark.parametrize(
    ("name", "dtype", "recompute", "layers", "measured"),
    [
        ("1f1b", "bf16", "none", 12, 4829.5),
        ("gpipe", "bf16", "full", 12, 3865.8),
        ("gpipe", "fp32", "none", 12, 15137.7),
        ("gpipe", "fp32", "none", 4, 5771.5),
    ],
)
def test_peaks_are_those_that_were_measured_on_an_h200(name, dtype, recompute, layers, measured):
    """MiB by `torch.cuda.max_memory_allocated` in a training step, torch 2.11, without the workspaces of cuBLAS."""
    config = GPTConfig(
        vocabulary_size=8192, layers=layers, width=1024, heads=16, sequence_length=1024, tie_embeddings=False
    )
    schedule, precision = families.build(name, num_ranks=1, num_microbatches=4), Precision(dtype)
    known = MemoryModel(
        stages=[gpt_layers(config, 4, 2 if precision.has_masters else 4)],
        precision=precision,
        recompute=[Recompute(recompute)],
    )
    (held,) = memory_of_ranks(lower(schedule), known)
    assert held.peak / 2**20 == pytest.approx(measured, rel=0.02)


def with_moments(**more) -> LayerMemory:
    """160 parameters and 1000 bytes; W needs 600 bytes, and a forward ends with 30 more than it keeps."""
    return replace(layer("w", 160, 1000.0), forward_bytes=30.0, deferred_bytes=600.0, **more)


def test_the_peak_inside_a_backward_is_at_one_of_its_moments():
    """Of one layer, with 1920 bytes of parameters and states, and 640 of gradients."""
    for moment, first, later in (
        (BackwardMoment(50.0), 1000 + 50, 1000 + 50 + 640),
        (BackwardMoment(-400.0, made=100), 1000, 1640),  # 400 bytes of gradients in place of 400 of activations
        (BackwardMoment(-400.0, making=160), 1000 - 400 + 640, 1000 - 400 + 640 + 640),
        (BackwardMoment(-400.0, summing=160), 1000, 1640),  # float32 sums of float32 gradients: nothing is converted
    ):
        of = MemoryModel(stages=[[with_moments(backward=[moment])]])
        for microbatches, activations, expected in ((1, 1000, first), (2, 2000, max(1000 + first, later))):
            (held,) = memory_of_ranks(one_rank(None, microbatches), of)
            assert held.kinds["activations"] == activations
            # at the end of a forward 30 bytes more, at the end of a backward all gradients
            assert held.peak == 12 * 160 + max(expected, activations + 30, activations - 1000 + 640)
    sixteen = MemoryModel(stages=[[with_moments(backward=[BackwardMoment(0.0, summing=160)])]], precision=BF16_SAME)
    wide = replace(sixteen, precision=Precision("bf16"))
    assert [memory_of_ranks(one_rank(None, 1), of)[0].kinds["temporary"] for of in (sixteen, wide)] == [30.0, 640.0]


def test_a_cpu_adds_gradients_of_weights_in_smaller_groups():
    schedule = families.build("zb-h1", num_ranks=2, num_microbatches=2)
    wide = replace(layer("w", 10 * 2**16, 1000.0), deferred_bytes=1000.0)
    narrow = [replace(layer(f"n{index}", 2**15, 1000.0), deferred_bytes=1000.0) for index in range(20)]
    for layers, most in (([wide], 10 * 2**16), (narrow, 2**16 + 2**15)):
        made = MemoryModel(stages=[layers, layers])
        peaks = [memory_of_ranks(lower(schedule), replace(made, device=device))[1].peak for device in ("cuda", "cpu")]
        assert peaks[0] - peaks[1] == 4 * (10 * 2**16 - most)


def test_recomputed_activations_wait_between_the_halves_of_a_backward():
    """I of a recomputed block leaves 600 bytes for W in place of 100."""
    schedule = families.build("zb-h2", num_ranks=2, num_microbatches=6)
    assert schedule.split_backwards
    kept = []
    for recompute in (Recompute.NONE, Recompute.FULL):
        of = MemoryModel(stages=[[with_moments()], [with_moments()]], recompute=[recompute] * 2)
        kept.append([rank.kinds["activations"] for rank in memory_of_ranks(lower(schedule), of)])
    for live, order, most in zip(kept[0], schedule.orders, kept[1], strict=True):
        now = peak = 0
        for action in order:
            now += {"F": 100, "I": 500, "W": -600, "B": -100}[action.op]
            peak = max(peak, now)
        assert most == peak < live


def test_bytes_follow_the_program_of_zero3():
    """Three chunks of one rank, two copies. At granularity step all is gathered, and gradients are whole, stage by
    stage, from the first backward to their reduction; at chunk two stages are there at once."""
    whole, part = 4 * 160, 4 * 80
    for granularity, gathered, gradients in (
        (Granularity.STEP, 3 * whole, 2 * whole + 2 * part),  # the last stage's, what is sent of it, and two sums
        (Granularity.CHUNK, 2 * whole, 2 * whole + 2 * part),
        (Granularity.MICROBATCH, whole, 2 * whole + 3 * part),  # and its own sum of the first micro-batch
    ):
        data = DataAxis(degree=2, strategy=DataStrategy.ZERO3, granularity=granularity)
        (held,) = memory_of_ranks(one_rank(data, chunks=3), model(3))
        assert (held.kinds["masters"], held.kinds["optimizer"]) == (3 * part, 6 * part)
        assert held.kinds["gathered"] == gathered, granularity
        assert held.kinds["gradients"] == gradients, granularity
    fine = DataAxis(degree=2, strategy=DataStrategy.ZERO3, granularity=Granularity.MICROBATCH)
    for bucket_bytes, layers in ((0, 2), (whole + 1, 4), (2**20, 5)):  # two neighbours; two buckets of two; all
        (held,) = memory_of_ranks(one_rank(fine), replace(model(1, layers=5), bucket_bytes=bucket_bytes))
        assert held.kinds["gathered"] == layers * whole


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("precision", [Precision(), Precision("bf16"), BF16_SAME])
@pytest.mark.parametrize("granularity", Granularity)
def test_more_copies_and_finer_granularity_take_no_more(strategy, precision, granularity):
    """On uneven stages, of a schedule with four chunks a rank."""
    if granularity is not Granularity.STEP and strategy not in (DataStrategy.ZERO2, DataStrategy.ZERO3):
        return
    schedule = families.build("interleaved", num_ranks=2, num_microbatches=4, num_chunks=4)
    stages = [[layer(f"{s}.{n}", 960, 50.0) for n in range(1 + s % 3)] for s in range(8)]
    uneven = MemoryModel(stages=stages, precision=precision)
    masters = precision.has_masters

    def peaks(granularity: Granularity, degree: int) -> list[float]:
        data = DataAxis(degree=degree, strategy=strategy, granularity=granularity, separate_master=masters)
        found = memory_of_ranks(lower(schedule, data=data), uneven)
        for rank in found:
            assert max(rank.kinds.values()) <= rank.peak <= sum(rank.kinds.values())
            assert rank.kinds["masters"] > 0 or not masters
        return [rank.peak for rank in found]

    if strategy not in (DataStrategy.DDP, DataStrategy.PARAMETER_SERVER):
        for two, twelve in zip(peaks(granularity, 2), peaks(granularity, 12), strict=True):
            assert twelve < two
    for coarse, fine in zip(peaks(Granularity.STEP, 12), peaks(granularity, 12), strict=True):
        assert fine <= coarse


def test_tied_parameters_count_once_where_both_stages_are_on_a_rank():
    shared = {"embedding.weight": (160,)}
    first, last = (replace(layer(name, 16, 0.0), parameters=shared) for name in ("embedding", "head"))
    both = MemoryModel(stages=[[first], [last]])
    (one,) = memory_of_ranks(one_rank(None, chunks=2), both)
    assert one.kinds["parameters"] == 4 * 160
    two = memory_of_ranks(lower(families.build("1f1b", num_ranks=2, num_microbatches=2)), both)
    assert [rank.kinds["parameters"] for rank in two] == [4 * 160] * 2


def test_messages_between_replicas_are_those_of_stages_that_a_rank_runs():
    """With one micro-batch, each of two ranks of chimera runs one of the two stages that it holds."""
    data, messages = DataAxis(degree=2, strategy=DataStrategy.ZERO1), {}
    for microbatches in (1, 2):
        program = lower(families.build("chimera", num_ranks=2, num_microbatches=microbatches), data=data)
        ranks = memory_of_ranks(program, model(stages=2, device="cpu"))
        messages[microbatches] = [rank.kinds["messages"] for rank in ranks if rank.replica == 0]
    assert messages == {1: [320, 320], 2: [640, 640]}  # half of 160 gradients of 4 bytes, of each stage


def test_streams_hold_older_versions_and_slices_their_part():
    stream = families.build("pipedream", num_ranks=3, num_microbatches=6)
    held = memory_of_ranks(lower(stream), model(3))
    assert [rank.kinds["versions"] for rank in held] == [2 * 640, 640, 0]
    assert [rank.kinds["activations"] for rank in held] == [3000, 2000, 1000]
    sliced = families.build("seq1f1b", num_ranks=2, num_microbatches=2, num_slices=2)
    assert [rank.kinds["activations"] for rank in memory_of_ranks(lower(sliced), model(2))] == [1500, 1000]


def test_what_is_moved_away_or_computed_again_is_not_there():
    program = one_rank(None, 6)
    (held,) = memory_of_ranks(insert_offload(program, 4), model(1))
    assert held.kinds["activations"] == 4000
    for kind, kept in ((Recompute.SELECTIVE, 500), (Recompute.FULL, 100)):
        (held,) = memory_of_ranks(program, model(1, recompute=(kind,)))
        assert held.kinds["activations"] == 6 * kept
        assert held.kinds["recomputed"] == 1000 - kept


# --- choices --------------------------------------------------------------------------------------------------------

SCHEDULE = families.build("interleaved", num_ranks=2, num_microbatches=4)
ZERO3 = DataAxis(degree=4, strategy=DataStrategy.ZERO3)


def ways(schedule: Schedule) -> list[Program]:
    return [lower(schedule, data=replace(ZERO3, granularity=granularity)) for granularity in Granularity]


def test_the_coarsest_granularity_that_fits_is_chosen_where_the_network_is_slow():
    schedule = families.build("interleaved", num_ranks=2, num_microbatches=4, num_chunks=3)
    small = model(6, parameters=16000, kept=0.0)
    costs = replace(Costs.uniform(), parameter_bytes=(64000.0,) * 6)
    slow = Network(data_bytes_per_second=64000.0)
    step, chunk, fine = (max(rank.peak for rank in memory_of_ranks(way, small)) for way in ways(schedule))
    assert fine < chunk < step
    for granularity, cap in zip(Granularity, (step, step - 1, chunk - 1), strict=True):
        choice = choose_memory(ways(schedule), small, cap, costs=costs, network=slow)
        assert choice.program.data.granularity is granularity
        assert choice.peak <= cap
    with pytest.raises(InputError, match=rf"needs at least {fine:.0f} \(.*\)\. Raise the cap"):
        choose_memory(ways(schedule), small, fine - 1)


def test_the_least_recomputation_is_chosen_stage_by_stage():
    """Against all combinations of all stages."""
    program = lower(SCHEDULE)
    big = model(4, parameters=16, kept=1000.0)
    tried = {}
    for kinds in itertools.product(Recompute, repeat=4):
        peak = max(rank.peak for rank in memory_of_ranks(program, replace(big, recompute=kinds)))
        tried[kinds] = peak
    for cap in sorted(set(tried.values())):
        choice = choose_memory([program], big, cap)
        assert choice.peak <= cap

        def cost(kinds: tuple[Recompute, ...]) -> float:
            return sum(big.stages[0][0].recompute_share[kind] for kind in kinds)

        assert cost(tuple(choice.model.recompute)) == min(cost(kinds) for kinds, peak in tried.items() if peak <= cap)
    with pytest.raises(InputError, match=rf"at least {min(tried.values()):.0f}"):
        choose_memory([program], big, min(tried.values()) - 1)


def test_a_rank_of_more_than_seven_stages_recomputes_all_of_them_alike():
    program, big = one_rank(None, chunks=8), model(8)
    cap = max(rank.peak for rank in memory_of_ranks(program, big)) - 1
    assert choose_memory([program], big, cap).model.recompute == (Recompute.SELECTIVE,) * 8
    # Of seven stages, one is enough.
    program, big = one_rank(None, chunks=7), model(7)
    cap = max(rank.peak for rank in memory_of_ranks(program, big)) - 1
    assert choose_memory([program], big, cap).model.recompute.count(Recompute.SELECTIVE) == 1


def test_both_are_weighed_by_the_clock():
    """Where the network costs nothing, a finer granularity is taken before anything is computed twice."""
    big = model(4, parameters=1600, kept=2000.0)
    program = lower(SCHEDULE, data=ZERO3)
    cap = max(rank.peak for rank in memory_of_ranks(program, big)) - 1
    free = choose_memory(ways(SCHEDULE), big, cap)
    assert free.program.data.granularity is not Granularity.STEP
    assert set(free.model.recompute) == {Recompute.NONE}
    costs = replace(Costs.uniform(), parameter_bytes=(6400.0,) * 4)
    slow = choose_memory(ways(SCHEDULE), big, cap, costs=costs, network=Network(data_bytes_per_second=200.0))
    assert slow.program.data.granularity is Granularity.STEP
    assert slow.peak <= cap
    assert set(slow.model.recompute) != {Recompute.NONE}


def test_the_time_of_a_way_counts_the_pieces_in_which_it_gathers():
    """As `pipeloom simulate --units` counts them: by the model, unless the costs say it."""
    deep = model(4, layers=3, parameters=1600)
    costs = Costs.uniform()
    slow = Network(data_bytes_per_second=4000.0, data_latency_seconds=0.01)
    sizes = {"parameter_bytes": (3 * 6400.0,) * 4}
    for fine, bucket_bytes, units in ((True, 0, 3), (True, 6401, 2), (False, 2**20, 1), (False, 6400, 3)):
        program = ways(SCHEDULE)[2 if fine else 0]
        choice = choose_memory([program], replace(deep, bucket_bytes=bucket_bytes), 1e12, costs=costs, network=slow)
        assert choice.seconds == simulate(program, replace(costs, units=(units,) * 4, **sizes), slow).makespan
        said = choose_memory([program], deep, 1e12, costs=replace(costs, units=(5,) * 4), network=slow)
        assert said.seconds == simulate(program, replace(costs, units=(5,) * 4, **sizes), slow).makespan
        assert said.seconds != choice.seconds


def test_memory_of_a_run_reads_back(tmp_path):
    rows = [
        MemoryRow(
            process=1,
            replica=0,
            rank=1,
            predicted={"parameters": 4.0, "peak": 9.0},
            measured={"parameters": 4.0, "peak": None},
        )
    ]
    write_memory(tmp_path, rows)
    assert read_memory(tmp_path) == rows
    (tmp_path / "memory.json").write_text("{}")
    with pytest.raises(InputError, match=r"memory.json: missing keys 'kinds', 'processes'. Add them \(keys kinds"):
        read_memory(tmp_path)
    with pytest.raises(InputError, match=r"has no memory\.json: `pipeloom train` writes it after its second step"):
        read_memory(tmp_path / "nowhere")


def test_weights_that_layers_of_a_stage_share_count_once_in_versions_and_reductions():
    sizes = GPTConfig(vocabulary_size=100, layers=2, width=8, heads=2, sequence_length=4, tie_embeddings=True)
    numbers = 100 * 8 + 2 * (12 * 8 * 8 + 2 * 8) + 8
    made = MemoryModel(stages=[gpt_layers(sizes, 1, 4)])
    [memory] = memory_of_ranks(lower(families.build("pipedream", num_ranks=1, num_microbatches=4)), made)
    assert (memory.kinds["parameters"], memory.kinds["versions"]) == (4 * numbers, 0)
    assert stage_bytes(made) == ((4 * numbers,), (4 * numbers,))


def test_layers_of_a_gpt_in_stages():
    layers = gpt_layers(
        GPTConfig(tie_embeddings=False, vocabulary_size=10, layers=5, width=4, heads=2, sequence_length=8), 1, 4
    )
    names = [[each.name for each in stage] for stage in in_stages(layers, [2, 2, 1])]
    assert names == [["embedding", "blocks.0", "blocks.1"], ["blocks.2", "blocks.3"], ["blocks.4", "norm", "head"]]
