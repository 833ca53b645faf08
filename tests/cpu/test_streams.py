"""Streams train exactly as the published rules of PipeDream and PipeDream-2BW say."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import nn

import pipeloom as pl
from pipeloom.ir import Op, WeightPolicy
from pipeloom.ir.versions import weight_version_bytes
from pipeloom.schedules import pipedream, pipedream_2bw
from tests.cpu import stream_reference
from tests.cpu.pairwise import fewer
from tests.cpu.ranks import run_ranks
from tests.cpu.reference import make_mlp
from tests.cpu.stream_reference import Made, Rule

mse = nn.functional.mse_loss
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9, nesterov=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "fused adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
}
FEW, MANY = 6, 50  # updates
ALONE = [(1,) * stages for stages in (2, 3, 4)]
REPLICATED = [(2, 1), (1, 2), (2, 1, 1)]


def make_schedule(rule: Rule, num_batches: int) -> pl.Schedule:
    sizes = {"num_ranks": sum(rule.replicas), "microbatches_per_update": rule.per_update, "replicas": rule.replicas}
    sizes["num_microbatches"] = num_batches * rule.per_update
    return pipedream_2bw(**sizes) if rule.weights == "2bw" else pipedream(weights=rule.weights, **sizes)


def make_batches(count: int, samples: int = 5, width: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(count)
    return [tuple(torch.randn(2, samples, width, generator=generator, dtype=torch.float64)) for _ in range(count)]


def make_stages(num_stages: int) -> list[nn.Module]:
    """What the pipeline makes of an MLP with as many layers, one more in the first stage."""
    layers = list(make_mlp(num_stages + 1, dtype=torch.float64))
    return [nn.Sequential(*layers[:2]), *(nn.Sequential(layer) for layer in layers[2:])]


def rule_of(weights: str, replicas: tuple[int, ...]) -> Rule:
    """With as few micro-batches an update as are legal; replicas update one backward later, so 2BW needs one more."""
    return Rule(weights, replicas, 1 if weights != "2bw" else 3 if max(replicas) > 1 else len(replicas) - 1)


def train_and_compare(rule: Rule, optimizer: str, transport: str, num_updates: int = FEW) -> None:
    """Weights, losses and norms after `num_updates` of every stage: bitwise, as sums have the reference's order."""
    num_stages = len(rule.replicas)
    num_batches = num_updates * max(rule.interval(s) for s in range(num_stages)) // rule.per_update
    schedule, batches, stages = make_schedule(rule, num_batches), make_batches(num_batches), make_stages(num_stages)
    expected = stream_reference.train(stages, rule, batches, mse, OPTIMIZERS[optimizer])
    with pl.Pipeline(stages, schedule, loss_fn=mse, transport=transport) as pipe:
        stream = pl.Stream(pipe, OPTIMIZERS[optimizer](list(pipe.parameters())))
        updates = stream.run(batches)
        assert [update.loss for update in updates] == expected.losses
        assert [update.batch for update in updates] == list(range(num_batches))
        compare(pipe, expected.parameters)
        checked = pl.check(schedule)
        num_bytes = weight_version_bytes(schedule, [sum(p.nbytes for p in stage.parameters()) for stage in stages])
        for rank in pipe.executor.local_ranks:
            assert stream.peak_weight_versions[rank] == checked.weight_versions[rank]
            assert stream.peak_weight_bytes[rank] == num_bytes[rank]
            assert pipe.memory.peak_live_activations[rank] == checked.live_activations[rank]
        for update in updates[:: num_updates // 4]:
            squares = [
                expected.norms[s, update.batch * rule.per_update // rule.interval(s)] ** 2 for s in range(num_stages)
            ]
            assert math.isclose(update.grad_norm, math.sqrt(sum(squares)), rel_tol=1e-14)


def compare(pipe: pl.Pipeline, expected: dict[str, torch.Tensor]) -> None:
    """The copies of all ranks of this process."""
    names = set()
    for name, parameter in pipe.named_parameters():
        name = name if name in expected else f"0.{name}"  # a lone stage's have no number
        assert torch.equal(parameter, expected[name]), name
        assert parameter.grad is None
        names.add(name)
    assert names == expected.keys() or len(pipe.executor.local_ranks) < pipe.schedule.num_ranks


@pytest.mark.parametrize("num_updates", fewer(FEW, MANY))
@pytest.mark.parametrize("replicas", ALONE + REPLICATED)
def test_on_loopback(replicas: tuple[int, ...], num_updates: int) -> None:
    """Every policy with every optimizer; with replicas in three cells of three."""
    optimizers = ("sgd", "momentum", "adamw")
    for k, (weights, optimizer) in enumerate(product(("stash", "vertical", "2bw"), optimizers)):
        if replicas in ALONE or (k + k // 3 + REPLICATED.index(replicas)) % 3 == 0:
            train_and_compare(rule_of(weights, replicas), optimizer, "loopback", num_updates)


def test_with_a_thread_for_each_rank() -> None:
    train_and_compare(Rule("stash", (2, 1, 1)), "fused adamw", "threads")
    train_and_compare(Rule("2bw", (1, 1, 1), 2), "momentum", "threads")


def test_several_micro_batches_an_update() -> None:
    """Uneven micro-batches whose versions differ within an update; with replicas that share a batch evenly or not."""
    for weights, replicas, per_update in (
        ("stash", (1, 1, 1), 2),
        ("stash", (1, 1, 1, 1), 3),
        ("vertical", (1, 1, 1), 2),
        ("stash", (2, 1), 2),
        ("stash", (1, 2), 3),
        ("2bw", (1, 1), 4),
        ("stash", (1,), 2),
    ):
        train_and_compare(Rule(weights, replicas, per_update), "momentum", "loopback", num_updates=8)


def _run_cells(rank: int, cells: list[tuple[Rule, str, str]], num_updates: int) -> None:
    for cell in cells:
        train_and_compare(*cell, num_updates)


@pytest.mark.parametrize("num_updates", fewer(FEW, MANY))
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_in_processes(num_ranks: int, num_updates: int) -> None:
    cells = [
        (rule_of(weights, replicas), optimizer, transport)
        for k, replicas in enumerate(r for r in ALONE + REPLICATED if sum(r) == num_ranks)
        for weights, optimizer, transport in (
            ("stash", "adamw", ("shared-memory", "torch")[k % 2]),
            ("2bw", "momentum", ("torch", "shared-memory")[k % 2]),
            ("vertical", "sgd", "shared-memory"),
        )
    ]
    run_ranks(_run_cells, num_ranks, cells, num_updates)


def test_muon_leaves_vectors_alone() -> None:
    """What an optimizer has not, keeps its values, and its versions share memory."""
    rule, batches = Rule("stash", (1, 1, 1)), make_batches(20)
    stages = make_stages(3)

    def make(parameters):
        return torch.optim.Muon([p for p in parameters if p.ndim == 2], lr=0.01)

    expected = stream_reference.train(stages, rule, batches, mse, make)
    with pl.Pipeline(stages, make_schedule(rule, 20), loss_fn=mse) as pipe:
        stream = pl.Stream(pipe, make(list(pipe.parameters())))
        stream.run(batches)
        compare(pipe, expected.parameters)
        # two layers of 8 x 8 and 8 on rank 0, three versions of the matrices
        assert stream.peak_weight_bytes == {0: 2 * (3 * 64 + 8) * 8, 1: (2 * 64 + 8) * 8, 2: (64 + 8) * 8}


@pytest.mark.parametrize("discount", ["none", "inverse", "pipemare"])
def test_learning_rates_and_clipping(discount: str) -> None:
    """The rate follows the batch, is discounted by the delay and scaled by replicas; every stage clips its share."""
    rule, batches, stages = Rule("stash", (2, 1, 1)), make_batches(30), make_stages(3)
    seen = set()

    def warm_up(batch: int) -> float:
        return 0.02 * min(1.0, (batch + 1) / 10)

    def rate(made: Made) -> float:
        seen.add((made.stage, made.delay))
        divisor = {"none": 1, "inverse": max(made.delay, 1), "pipemare": 1.0}[discount]
        if discount == "pipemare":
            divisor = max(made.delay, 1) ** (1 - min(made.update / 8, 1))
        return warm_up(made.batch) * (made.num_batches / rule.replicas[0] / divisor)

    expected = stream_reference.train(
        stages, rule, batches, mse, OPTIMIZERS["momentum"], max_norm=0.3 / math.sqrt(3), learning_rate=rate
    )
    assert len({delay for _, delay in seen}) > 1
    with pl.Pipeline(stages, make_schedule(rule, 30), loss_fn=mse) as pipe:
        optimizer = OPTIMIZERS["momentum"](list(pipe.parameters()))
        stream = pl.Stream(
            pipe,
            optimizer,
            max_norm=0.3,
            learning_rate=warm_up,
            discount=discount,
            discount_updates=8 if discount == "pipemare" else None,
            scale_by_replicas=True,
        )
        stream.run(batches)
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter, expected.parameters[name], rtol=1e-12, atol=1e-15)
        assert [group["lr"] for group in optimizer.param_groups] == [0.02]  # as it was


@pytest.mark.parametrize("family", ["interleaved", "zb-h1"])
def test_an_order_of_ones_own(family: str) -> None:
    """Several stages on a rank and split backwards: any legal order is a stream if its schedule says when to update."""
    flushed = pl.schedules.build(family, num_ranks=2, num_microbatches=8)
    schedule = replace(flushed, name="own", weights=WeightPolicy.STASH, microbatches_per_update=2)
    rule, batches = Rule("stash", (1,) * schedule.num_stages, 2), make_batches(4)
    met: dict[tuple[int, int], int] = {}
    for order in schedule.orders:  # the version that an F meets: so many updates have all their backwards before it
        done: dict[int, list[int]] = {stage: [] for stage in range(schedule.num_stages)}
        for action in order:
            last = Op.W if (action.stage, action.microbatch, None) in schedule.split_backwards else Op.B
            if action.op is Op.F:
                met[action.stage, action.microbatch] = len(done[action.stage]) // 2
            elif action.op is last:
                done[action.stage].append(action.microbatch)
    assert len(set(met.values())) > 1
    stages = make_stages(schedule.num_stages)
    expected = stream_reference.train(
        stages, rule, batches, mse, OPTIMIZERS["momentum"], version=lambda s, b: met[s, b]
    )
    with pl.Pipeline(stages, schedule, loss_fn=mse) as pipe:
        stream = pl.Stream(pipe, OPTIMIZERS["momentum"](list(pipe.parameters())))
        stream.run(batches)
        compare(pipe, expected.parameters)
        assert stream.peak_weight_versions == dict(enumerate(pl.check(schedule).weight_versions))
        num_bytes = weight_version_bytes(schedule, [sum(p.nbytes for p in stage.parameters()) for stage in stages])
        assert stream.peak_weight_bytes == dict(enumerate(num_bytes))


def test_a_run_drains_so_training_goes_on_from_there() -> None:
    """Two runs are what two runs with saved and loaded weights, optimizer and number of batches are."""
    rule, batches = Rule("stash", (2, 1)), make_batches(24)
    schedule = make_schedule(rule, 24)

    def warm_up(batch: int) -> float:
        return 0.001 * (batch + 1)

    with pl.Pipeline(make_stages(2), schedule, loss_fn=mse) as whole:
        optimizer = OPTIMIZERS["adamw"](list(whole.parameters()))
        stream = pl.Stream(whole, optimizer, learning_rate=warm_up)
        first = stream.run(batches[:10])
        weights = copy.deepcopy(whole.state_dict())
        state = copy.deepcopy(optimizer.state_dict())
        second = stream.run(batches[10:])
        assert [update.batch for update in first + second] == list(range(24))
        final = {name: parameter.detach().clone() for name, parameter in whole.named_parameters()}
        assert not any(whole.processor_seconds.values())  # of each micro-batch, which nobody reads
    with pl.Pipeline(make_stages(2), schedule, loss_fn=mse) as resumed:
        optimizer = OPTIMIZERS["adamw"](list(resumed.parameters()))
        resumed.load_state_dict(weights)
        optimizer.load_state_dict(state)
        stream = pl.Stream(resumed, optimizer, learning_rate=warm_up, num_batches=10)
        assert stream.run(iter(batches[10:]), num_batches=14) == second
        compare(resumed, final)
