"""Layers of experts: the layer against one expert per token, and mixtures in pipelines against one process."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import pipeloom as pl
from pipeloom.models import GPT, GPTConfig, init_parameters, loss_fn
from pipeloom.models.experts import Experts


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def make_layer(**settings) -> Experts:
    layer = Experts(**{"width": 6, "expert_width": 10, "experts": 4, **settings})
    init_parameters(layer, seed=1)
    return layer


@pytest.mark.parametrize("shared", [0, 2])
@pytest.mark.parametrize("gated", [False, True])
def test_a_layer_is_the_sum_of_its_experts_times_their_gates(gated, shared):
    layer = make_layer(gated=gated, shared_experts=shared)
    x = torch.randn(3, 5, 6, requires_grad=True)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(20)
    y = layer(x)

    def mlp(token, up, down):
        inside = up @ token
        inside = F.silu(inside[: len(inside) // 2]) * inside[len(inside) // 2 :] if gated else F.gelu(inside)
        return down @ inside

    up = layer.gate_up if gated else layer.up
    expected = []
    for token in x.flatten(0, 1):
        share = F.softmax(layer.router.weight @ token, -1)
        best = sorted(range(4), key=lambda e: -share[e])[:2]
        result = sum(share[e] / share[best].sum() * mlp(token, up[e], layer.down[e]) for e in best)
        if shared:
            result = result + mlp(token, layer.shared_up.weight, layer.shared_down.weight)
        expected.append(result)
    expected = torch.stack(expected).view_as(x)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-14)
    probe = torch.randn_like(y)
    inputs = [x, *layer.parameters()]
    got = torch.autograd.grad((y * probe).sum(), inputs)
    for one, other in zip(got, torch.autograd.grad((expected * probe).sum(), inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)


def test_an_expert_without_tokens_gets_a_zero_gradient():
    layer = make_layer(experts=3, top_k=1)
    with torch.no_grad():
        layer.router.weight.zero_()[1] = 1.0
    layer(torch.rand(2, 3, 6)).sum().backward()
    assert layer.up.grad[1].abs().sum() > 0
    assert not layer.up.grad[[0, 2]].any()
    assert not layer.down.grad[[0, 2]].any()


SIZES = {"layers": 4, "width": 16, "heads": 2, "sequence_length": 8, "vocabulary_size": 32, "tie_embeddings": False}


def make_model(**changes) -> GPT:
    model = GPT(GPTConfig(**{**SIZES, "experts": 4, "experts_every": 2, **changes}))
    init_parameters(model, seed=0)
    return model


@pytest.mark.parametrize(
    ("schedule", "recompute"), [("1f1b", "full"), ("zb-h1", "none"), ("zb-v", "full"), ("interleaved", "none")]
)
def test_a_mixture_in_a_pipeline_has_the_gradients_of_one_process(schedule, recompute):
    tokens = torch.randint(0, 32, (8, 8))
    one, piped = make_model(shared_experts=1), make_model(shared_experts=1)
    loss = 0.0
    for part in tokens.chunk(4):
        with pl.auxiliary_losses() as found:
            own = loss_fn(one(part), part)
        ((own + found.total()) / 4).backward()
        loss += own / 4
    schedule = pl.schedules.build(schedule, num_ranks=2, num_microbatches=4)
    pipe = pl.Pipeline(piped, schedule=schedule, loss_fn=loss_fn, transport="loopback", recompute=recompute)
    assert abs(pipe.step(tokens, tokens) - loss) < 1e-12
    for (name, a), b in zip(one.named_parameters(), piped.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-12, atol=1e-15, msg=name)


def test_parameters_are_counted_and_initialized_by_name():
    model = make_model(experts=3, shared_experts=2, expert_width=24)
    assert sum(parameter.numel() for parameter in model.parameters()) == model.config.num_parameters
    experts = model.blocks[1].experts
    assert model.blocks[0].experts is None
    assert experts.up.shape == (3, 24, 16)
    assert experts.down.shape == (3, 16, 24)
    assert abs(experts.up.std() / 0.02 - 1) < 0.1
    for matrix in (experts.down, experts.shared_down.weight):
        assert abs(matrix.std() / (0.02 / 8**0.5) - 1) < 0.1
