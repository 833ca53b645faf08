"""Layers of Megatron's layout: plans for any model, bytes; and that lost sums are noticed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pipeloom as pl
from pipeloom.engine.stores.blocks import BlockSum
from pipeloom.errors import StageError
from pipeloom.models import GPT, init_parameters, materialize
from pipeloom.parallel import axis_functions
from pipeloom.parallel.axis import Axis
from pipeloom.parallel.placed import placed
from pipeloom.parallel.tensor.one_d import linear
from tests.cpu.pairwise import in_turn, of_grid
from tests.cpu.tensor_cases import (
    MICROBATCHES,
    SAMPLES,
    TOKENS,
    assert_equal,
    build,
    config,
    on_mesh,
    one_process,
    run,
)


class Layer(nn.Module):
    """A block with biases, gates that are fused, and positions of its own: [B, S, 8] -> [B, S, 8]."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.gates = nn.Linear(8, 32)
        self.down = nn.Linear(16, 8)

    def forward(self, x):
        gate, value = self.gates(self.norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * value)


class Model(nn.Module):
    """Ids [B, S] -> logits [B, S, 30]."""

    pipeline_layers = ("table", "layers.*", "head")

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(30, 8, padding_idx=3)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(8, 30)

    def forward(self, ids):
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def made():
    model = Model().double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)
        model.table.weight[3] = 0.0
    return model


PLAN = {"table": "vocabulary", "layers.*.gates": "packed_colwise", "layers.*.down": "rowwise", "head": "vocabulary"}
PLANS = {
    "all": PLAN,
    "gathered head": PLAN | {"head": "colwise_rep"},
    "gathered gates": PLAN | {"layers.*.gates": "colwise_gather_output", "layers.*.down": "rowwise_split_input"},
}


@pytest.mark.parametrize(("plan", "sequence", "tp"), of_grid(PLANS, [False, True], [2, 4]), ids=str)
def test_plans_for_models_of_users(plan, sequence, tp):
    """With biases, and losses that are plain functions of torch; 30 ids are padded for 4 ranks."""

    def loss(logits, targets):
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=7)

    found = run(made, "zb-h1", plan=PLANS[plan], loss=loss, sequence=sequence, pp=2, tp=tp)
    expected = one_process(made(), loss)
    assert_equal(found, expected)
    assert not found.gradients["table.weight"][3].any()


@pytest.mark.parametrize("gates", [{}, {"layers.*.gates": "colwise_gather_output"}], ids=["left out", "gathered"])
def test_a_row_layer_takes_its_part_of_a_whole_input(gates):
    plan = {"layers.*.down": "rowwise"} | gates
    assert_equal(run(made, "zb-h1", plan=plan, pp=2, tp=2), one_process(made()))
    with pytest.raises(StageError, match="has 8 inputs on each process, and gets 16"):
        run(made, plan=plan | {"table": "vocabulary", "head": "vocabulary"}, sequence=True, tp=2)


def test_a_plan_may_leave_layers_out():
    """Without the embedding and the head: these are on all ranks."""
    plan = {key: kind for key, kind in PLAN.items() if key.startswith("layers")}
    assert_equal(run(made, plan=plan, tp=2), one_process(made()))


def test_a_model_on_the_meta_device_starts_from_the_same_values():
    sizes = config(kv_heads=2, vocabulary_size=31, tie_embeddings=True)

    def work(mesh):
        with torch.device("meta"):
            model = GPT(sizes)
        pl.parallelize(model, mesh, sequence=True)
        assert all(parameter.is_meta for parameter in model.parameters())
        materialize(model, 5)
        assert model.head.weight is model.embedding.weight
        whole = GPT(sizes)
        init_parameters(whole, seed=5)
        pl.parallelize(whole, mesh, sequence=True)
        for (name, own), other in zip(model.named_parameters(), whole.parameters(), strict=True):
            assert torch.equal(own, other), name
            assert placed(own) == placed(other)

    on_mesh(work, tp=2)


def test_names_stay_and_each_rank_has_its_share():
    sizes = config(vocabulary_size=32)
    names = [name for name, _ in GPT(sizes).named_parameters()]

    def work(mesh):
        model = pl.parallelize(build(sizes), mesh)
        assert [name for name, _ in model.named_parameters()] == names
        norms = sum(p.numel() for name, p in model.named_parameters() if "norm" in name)
        return sum(p.numel() for p in model.parameters()) - norms, norms

    for cut, whole in on_mesh(work, tp=4):
        assert 4 * cut + whole == sizes.num_parameters


# Bytes


@pytest.mark.parametrize("tp", [2, 4])
def test_bytes_of_tensor_parallelism(tp):
    """4 all-reduces of b s h per layer; 1 each of the embedding and the head; 3 numbers per token of the loss."""
    found, size = run(lambda: build(config()), tp=tp), SAMPLES * TOKENS * 8
    expected = (4 * 4 + 2) * size * 16 + 3 * size
    assert found.traffic == {"all_reduce": ((4 * 4 + 2 + 2) * MICROBATCHES, 2 * (tp - 1) * expected // tp)}


@pytest.mark.parametrize(("tp", "schedule"), in_turn([2, 4], ["gpipe", "zb-h1"]))
def test_bytes_of_sequence_parallelism(tp, schedule):
    """The same bytes, as reduce-scatters and all-gathers; and gathers again, one for each gathered input.

    Split backwards gather no more often.
    """
    found, part = run(lambda: build(config()), schedule, tp=tp, sequence=True), SAMPLES * TOKENS * 8 * (tp - 1) // tp
    parameters = (2 * 4 + 1) * 16 * 8  # gains of norms: one sum at the end of the step
    again = 2 * 4 + 1
    assert found.traffic["reduce_scatter"] == ((4 * 4 + 2) * MICROBATCHES, (4 * 4 + 2) * part * 16)
    assert found.traffic["all_gather"] == ((4 * 4 + 2 + again) * MICROBATCHES, (4 * 4 + 2 + again) * part * 16)
    calls, num_bytes = found.traffic["all_reduce"]
    flags = (2 * 4 + 1) * 8
    assert calls == 2 * MICROBATCHES + 1
    assert num_bytes == 2 * 3 * part + 2 * (parameters + flags) * (tp - 1) // tp


def test_recomputed_blocks_gather_once_more_and_no_second_time():
    options = {"pipeline_options": {"recompute": "full"}}
    found = run(lambda: build(config()), tp=2, sequence=True, **options)
    calls, _ = found.traffic["all_gather"]
    assert calls == (2 * 4 + 2 * 4 + 2 + 1 + 2 * 4) * MICROBATCHES  # forward, backward, ends, head, recomputation


# Sabotage: what the comparison with one process must notice


def _skip(monkeypatch, place, name):
    monkeypatch.setattr(place, name, lambda x, *_, **__: x)


@pytest.mark.parametrize("lost", ["f", "g", "head", "norms", "tokens", "bias", "shared keys"])
def test_a_lost_sum_is_noticed(lost, monkeypatch):
    sequence, sizes = lost in ("norms", "tokens"), config(kv_heads=1)
    model, plan = (made, PLAN) if lost == "bias" else (lambda: build(sizes), None)
    match lost:
        case "f":
            _skip(monkeypatch, axis_functions, "copy_to")
        case "g":
            monkeypatch.setattr(linear, "scatter_sum", lambda x, axis, *, sequence: x)
        case "head":
            whole = Axis.all_reduce
            monkeypatch.setattr(Axis, "all_reduce", lambda s, x, c="sum": x if x.dim() == 2 else whole(s, x, c))
        case "norms" | "shared keys":
            monkeypatch.setattr(BlockSum, "finish", lambda self: None)
        case "tokens":
            monkeypatch.setattr(Axis, "reduce_scatter", lambda s, x, dim=0: x.chunk(s.degree, dim)[s.index].clone())
        case "bias":
            plain = linear.RowLinear.forward
            monkeypatch.setattr(linear.RowLinear, "forward", lambda self, x: plain(self, x) + self.bias)
    with pytest.raises(AssertionError):
        assert_equal(run(model, plan=plan, tp=2, sequence=sequence), one_process(model()))


# Memory


@pytest.mark.parametrize(("tp", "sequence"), in_turn([1, 2, 4], [False, True]))
def test_a_block_keeps_its_share_of_the_activations(tp, sequence):
    """Of T tokens and width W: 4 T W on all ranks, with sequence parallelism on T / t tokens; 12 T W / t of cut layers.

    Gathered tokens are not kept. In addition: two numbers per norm and token, one per head and token.
    """
    sizes = config(width=32, heads=4, layers=1)

    def work(mesh):
        block = pl.parallelize(build(sizes), mesh, sequence=sequence).blocks[0]
        tokens = TOKENS // tp if sequence else TOKENS
        x = torch.randn(2, tokens, 32, dtype=torch.float64, requires_grad=True)
        own = {t.untyped_storage().data_ptr() for t in (*block.parameters(), *block.buffers())}
        kept: dict[int, int] = {}
        held = []

        def keep(tensor):
            held.append(tensor)
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            block(x)
        rows = 2 * tokens
        assert sum(kept.values()) == 8 * (4 * rows * 32 + 2 * 2 * rows + (12 * 32 + 4) * 2 * TOKENS // tp)

    on_mesh(work, tp=tp)
