"""Pipelines over context-parallel ranks train as one process does; what they refuse; and that tests notice defects."""

from __future__ import annotations

import copy
from functools import partial
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import pipeloom as pl
from pipeloom.autograd.saved_bytes import SavedBytes
from pipeloom.models import loss_fn
from pipeloom.parallel.context import KINDS, ContextParallel, ContextTokens, kernels, ring
from pipeloom.parallel.context.order import Order
from pipeloom.transport import shared_memory
from pipeloom.transport.thread_members import run_threads
from tests.cpu.context_cases import (
    Heads,
    Problem,
    S,
    attends,
    batch,
    differences,
    error,
    make_both,
    make_gpt,
    train_alone,
    train_together,
    trains,
)
from tests.cpu.pairwise import in_turn, of_grid
from tests.cpu.ranks import run_ranks

make_small = partial(make_gpt, layers=2)  # one block per stage of two


SETTINGS = [{}, {"positions": "learned", "tie_embeddings": False}, {"kv_heads": 2}]


@pytest.mark.parametrize(("kind", "settings"), in_turn([*KINDS, None], SETTINGS), ids=str)
def test_a_gpt_trains_as_in_one_process(kind, settings):
    trains(partial(make_small, **settings), "1f1b", {"pp": 2, "cp": 2}, kind)


@pytest.mark.parametrize(("kind", "degree"), in_turn(["ring", "ring-self-attention"], [3, 4]))
def test_more_ranks(kind, degree):
    trains(make_small, "1f1b", {"cp": degree}, kind)


ORDERS = ["gpipe", "interleaved", "zb-h1", "zb-v", "dualpipev"]


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        pytest.param(kind, family, marks=() if turn % 2 == (kind == "ulysses") else pytest.mark.whole_grid)
        for (turn, family), kind in product(enumerate(ORDERS), ["ring", "ulysses"])
    ],
)
def test_every_kind_of_schedule(kind, family):
    trains(make_gpt, family, {"pp": 2, "cp": 2}, kind)


@pytest.mark.parametrize(
    ("strategy", "degrees"),
    in_turn(["ddp", "zero1", "zero2", "zero3"], [{"dp": 2, "cp": 2}, {"pp": 2, "dp": 2, "cp": 2}]),
    ids=str,
)
def test_replicas_of_context_parallel_pipelines(strategy, degrees):
    trains(make_small, "1f1b", degrees, "ring", data=strategy)


@pytest.mark.parametrize(
    ("kind", "recompute"),
    [
        pytest.param(kind, recompute, marks=() if turn % 2 == (recompute == "full") else pytest.mark.whole_grid)
        for (turn, kind), recompute in product(enumerate(KINDS), ["selective", "full"])
    ],
)
def test_recomputation(kind, recompute):
    trains(make_small, "zb-h1", {"pp": 2, "cp": 2}, kind, recompute=recompute)


TRAINED = [("1f1b", "ddp"), ("interleaved", "zero1"), ("zb-v", "zero3"), ("dualpipev", "zero1")]
TRAINED_KINDS = ["ring", "ring-self-attention", "ulysses"]


def _trained(kind: str, turn: int, case: tuple[str, str], updates: int):
    """Each schedule with one kind in every run of the tests; the inside-stage matrix has pairs of others."""
    marks = () if TRAINED_KINDS[turn % 3] == kind and updates == 6 else pytest.mark.whole_grid
    return pytest.param(kind, *case, updates, marks=marks)


@pytest.mark.parametrize(
    ("kind", "family", "strategy", "updates"),
    [_trained(kind, *case, updates) for kind, case, updates in product(TRAINED_KINDS, enumerate(TRAINED), (6, 20))],
)
def test_updates_in_32_bits(kind, family, strategy, updates):
    tied = strategy == "zero1"
    model = make_gpt(tie_embeddings=tied, kv_heads=4 if tied else 2).float()
    steps = [batch(seed) for seed in range(updates)]

    def losses(parameters, step) -> list[float]:
        optimizer, found = torch.optim.AdamW(parameters, lr=1e-3), []
        for inputs, targets in steps:
            optimizer.zero_grad()
            found.append(float(step(inputs, targets)))
            optimizer.step()
        return found

    def together() -> list[float]:
        schedule = pl.schedules.build(family, num_ranks=2, num_microbatches=4)
        settings = {"mesh": pl.Mesh(pp=2, cp=2), "context": kind, "data": strategy}
        with pl.Pipeline(copy.deepcopy(model), schedule, loss_fn=loss_fn, **settings) as pipe:
            return losses(pipe.parameters(), pipe.step)

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = loss_fn(alone(inputs), targets)
        loss.backward()
        return loss.detach()

    alone = copy.deepcopy(model)
    expected = losses(alone.parameters(), step)
    for found in run_threads(4, together):
        assert found == pytest.approx(expected, rel=1e-5)


class Masked(TorchFunctionMode):
    """Gives every attention a mask, in place of causal order."""

    def __init__(self, allowed: torch.Tensor) -> None:
        super().__init__()
        self._allowed = allowed

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            q, k, v = args[:3]
            return func(q, k, v, attn_mask=self._allowed)
        return func(*args, **(kwargs or {}))


NAMES = [("attention_mask",), ("document_ids",), ("attention_mask", "document_ids")]


@pytest.mark.parametrize(("kind", "names"), in_turn(KINDS, NAMES), ids=str)
def test_masks_of_the_batch_reach_every_stage(kind, names):
    position = torch.arange(S)
    masks = {"attention_mask": (position < 19).long(), "document_ids": (position >= 5).long() + (position >= 14)}
    allowed = position[:, None] >= position
    if "attention_mask" in names:
        allowed = allowed & masks["attention_mask"].bool()
    if "document_ids" in names:
        allowed = allowed & (masks["document_ids"][:, None] == masks["document_ids"])
    with Masked(allowed[None, None]):
        expected = train_alone(make_small())

    def inputs(x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"input_ids": x, **{name: masks[name].expand(len(x), -1) for name in names}}

    trains(make_small, "1f1b", {"pp": 2, "cp": 2}, kind, expected=expected, inputs=inputs)


@pytest.mark.parametrize("kind", KINDS)
def test_attention_both_ways_in_a_model_of_ones_own(kind):
    model = make_both()
    make = partial(copy.deepcopy, model)  # threads share the random generator
    trains(make, "1f1b", {"pp": 2, "cp": 2}, kind, expected=train_alone(make()))


def _in_processes(rank: int, kind: str, family: str, strategy: str, expected) -> float:
    degrees = {"pp": 2, "cp": 2}
    return max(differences(train_together(make_gpt(), family, degrees, kind, data=strategy), expected, 0, 1))


@pytest.mark.parametrize(
    ("kind", "family", "strategy"),
    [("ring", "1f1b", "ddp"), ("ring", "zb-v", "zero3"), ("ring-self-attention", "1f1b", "zero1"),
     ("ulysses", "interleaved", "ddp")],
)  # fmt: skip
def test_in_processes(kind, family, strategy):
    expected = train_alone(make_gpt())
    assert max(run_ranks(_in_processes, 4, kind, family, strategy, expected)) < 1e-12


@pytest.mark.parametrize(("kind", "stages", "sequence"), of_grid(["ring", "ulysses"], [1, 2], [False, True]), ids=str)
def test_tensor_parallel_stages(kind, stages, sequence):
    def make() -> nn.Module:
        return make_small(positions="learned")

    degrees = {"pp": stages, "cp": 2, "tp": 2}
    trains(make, "1f1b", degrees, kind, prepare=lambda m, mesh: pl.parallelize(m, mesh, sequence=sequence))


@pytest.mark.parametrize("kind", ["ring", "ring-plain"])
def test_activations_kept_are_those_of_one_process_divided_by_the_ranks(kind):
    def kept(degree: int) -> int:
        def run() -> int:
            mesh, model = pl.Mesh(cp=degree), make_gpt(sequence_length=8 * S)
            schedule = pl.schedules.one_f_one_b(num_ranks=1, num_microbatches=1)
            inputs, targets = (value.repeat(1, 8) for value in batch())
            with pl.Pipeline(model, schedule, loss_fn=loss_fn, mesh=mesh, context=kind) as pipe:
                saved = SavedBytes([*pipe.parameters(), *(b for m in pipe.modules() for b in m.buffers())])
                with saved.counting():
                    pipe.step(inputs, targets)
                return saved.peak

        (peak,) = set(run_threads(degree, run))
        return peak

    assert kept(2) == pytest.approx(kept(1) / 2, rel=0.02)


def _over_gloo(rank: int, kind: str, degree: int, problem, expected) -> float:
    shared_memory.available = lambda: False  # as between hosts
    found, _ = problem.together(kind, degree)
    return error(found, expected)


@pytest.mark.parametrize(("kind", "degree"), in_turn(["ring", "ring-self-attention", "ulysses"], [2, 3]))
def test_over_a_process_group(kind, degree):
    heads = Heads(12, 12) if kind == "ulysses" else Heads(12, 4)
    problem = Problem(heads, causal=True, masks="documents")
    assert max(run_ranks(_over_gloo, degree, kind, degree, problem, problem.alone())) < 1e-12


# --- sabotage -------------------------------------------------------------------------------------------------------


def test_a_skipped_block_is_noticed(monkeypatch):
    blocks = Order.blocks

    def skipping(self, rank, source, *, causal):
        return [] if (rank, source) == (1, 0) else blocks(self, rank, source, causal=causal)

    monkeypatch.setattr(Order, "blocks", skipping)
    with pytest.raises(AssertionError):
        attends("ring", 2, Problem(Heads(12, 12), causal=True, masks="none"))
    with pytest.raises(AssertionError):
        trains(make_gpt, "1f1b", {"pp": 2, "cp": 2}, "ring")


def test_gradients_divided_by_the_number_of_ranks_are_noticed(monkeypatch):
    backward = kernels.backward

    def divided(*arguments, **settings):
        dq, dk, dv = backward(*arguments, **settings)
        return dq, dk / 2, dv

    monkeypatch.setattr(ring.kernels, "backward", divided)
    with pytest.raises(AssertionError):
        attends("ring", 2, Problem(Heads(12, 12), causal=True, masks="none"))
    with pytest.raises(AssertionError):
        trains(make_gpt, "1f1b", {"pp": 2, "cp": 2}, "ring")


def test_positions_of_another_order_are_noticed(monkeypatch):
    with torch.no_grad():
        expected = make_gpt()(batch()[0])

    def run() -> float:
        mesh = pl.Mesh(cp=2)
        context = ContextParallel(mesh.axis("cp"))
        with torch.no_grad(), context.tokens({"length": S}).current():
            return error([context.gather(make_gpt()(context.cut(batch()[0])))], [expected])

    assert max(run_threads(2, run)) < 1e-12
    plain = {rank: torch.arange(rank * S // 2, (rank + 1) * S // 2) for rank in range(2)}
    monkeypatch.setattr(ContextTokens, "_positions_of", lambda self, rank, device: plain[rank])
    assert min(run_threads(2, run)) > 1e-3
