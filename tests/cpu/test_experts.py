"""Layers of experts: the layer against one expert per token, and mixtures in pipelines against one process."""

from __future__ import annotations

from functools import partial
from threading import Thread

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import pipeloom as pl
from pipeloom.autograd import grouped_linear
from pipeloom.autograd.split_backward import backward_input, root_of
from pipeloom.errors import InputError
from pipeloom.models import GPT, GPTConfig, init_parameters, loss_fn
from pipeloom.models.experts import ROUTERS, Experts
from pipeloom.models.experts.routers import CLASSES
from pipeloom.slicing.dropout_parts import DropoutParts


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


PIPELINES = [
    ("1f1b", "full", {"router": "switch"}),
    ("zb-h1", "none", {"shared_experts": 1}),
    ("zb-v", "full", {"router": "sigmoid", "top_k": 3}),
    ("interleaved", "none", {"router": "glam", "capacity_factor": 0.7, "z_loss_weight": 0.1}),
    ("dualpipev", "full", {"router": "noisy-topk"}),
    ("zb-h1", "selective", {"router": "expert-choice", "capacity_by": "sequence"}),
    ("dualpipev", "selective", {"router": "topk", "top_k": 1, "capacity_factor": 0.5}),
    *(
        pytest.param(schedule, recompute, {"router": router}, marks=pytest.mark.whole_grid)
        for schedule in ("1f1b", "zb-h1", "zb-v", "interleaved", "dualpipev")
        for recompute in ("none", "selective", "full")
        for router in ROUTERS
    ),
]


@pytest.mark.filterwarnings("ignore:router 'expert-choice'")
@pytest.mark.parametrize(("schedule", "recompute", "changes"), PIPELINES)
def test_a_mixture_in_a_pipeline_has_the_gradients_of_one_process(schedule, recompute, changes, monkeypatch):
    """Loss, gradients, values of auxiliary losses. Random numbers are replaced: the orders of forwards differ."""
    for name in ("switch", "gshard", "noisy-topk"):
        monkeypatch.setattr(CLASSES[name], "draw", lambda _, like, **__: like.detach().sin().abs())
    tokens = torch.randint(0, 32, (16, 8))
    one, piped = make_model(**changes), make_model(**changes)
    loss, values = 0.0, 0.0
    for part in tokens.chunk(8):
        with pl.auxiliary_losses() as found:
            own = loss_fn(one(part), part)
        ((own + found.total()) / 8).backward()
        loss += own / 8
        values += sum(each.value for each in found.losses) / 8
    schedule = pl.schedules.build(schedule, num_ranks=2, num_microbatches=8)
    pipe = pl.Pipeline(piped, schedule=schedule, loss_fn=loss_fn, transport="loopback", recompute=recompute)
    assert abs(pipe.step(tokens, tokens) - loss) < 1e-12
    for (name, a), b in zip(one.named_parameters(), piped.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-11, atol=1e-15, msg=name)
    reported = sum(each.value for losses in pipe.auxiliary_losses().values() for each in losses.values())
    assert abs(reported - values) < 1e-12


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_slices_have_the_results_of_full_sequences(recompute):
    """Without drops a token's experts depend on the token alone; the balance loss would be that of each slice."""
    tokens = torch.randint(0, 32, (8, 8))
    one, sliced = make_model(balance_weight=0.0), make_model(balance_weight=0.0)
    loss = loss_fn(one(tokens), tokens)
    loss.backward()
    schedule = pl.schedules.build("seq1f1b", num_ranks=2, num_microbatches=4, num_slices=2)
    settings = {"schedule": schedule, "loss_fn": loss_fn, "transport": "loopback", "slices": [5, 3]}
    assert abs(pl.Pipeline(sliced, recompute=recompute, **settings).step(tokens, tokens) - loss) < 1e-12
    for (name, a), b in zip(one.named_parameters(), sliced.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-11, atol=1e-15, msg=name)


@pytest.mark.filterwarnings("error")
def test_expert_choice_warns_of_the_future_and_refuses_slices():
    with pytest.warns(UserWarning, match=r"^router 'expert-choice' in a causal model: .* see the future") as warned:
        model = make_model(router="expert-choice", experts_every=1)
    assert len(warned) == 1
    schedule = pl.schedules.build("seq1f1b", num_ranks=2, num_microbatches=4, num_slices=2)
    with pytest.raises(InputError, match=r"module '.*experts' \(Experts\) chooses among all tokens of a sequence"):
        pl.Pipeline(model, schedule=schedule, loss_fn=loss_fn, transport="loopback", slices=[5, 3])


@pytest.mark.parametrize("router", ["switch", "gshard", "noisy-topk"])
def test_recomputation_draws_the_random_numbers_of_the_forward(router):
    tokens = torch.randint(0, 32, (8, 8))
    gradients = []
    for recompute in ("none", "full"):
        model = make_model(router=router)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        schedule = pl.schedules.build("zb-h1", num_ranks=2, num_microbatches=4)
        pipe = pl.Pipeline(model, schedule=schedule, loss_fn=loss_fn, transport="loopback", recompute=recompute)
        torch.manual_seed(5)
        pipe.step(tokens, tokens)
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *gradients))


def test_random_routers_are_refused_where_threads_share_a_generator():
    def rank():
        mesh = pl.Mesh(pp=2)
        schedule = pl.schedules.build("1f1b", num_ranks=2, num_microbatches=2)
        with pytest.raises(InputError, match=r"^recompute='full' with a router that draws random"):
            pl.Pipeline(make_model(router="switch"), schedule=schedule, mesh=mesh, loss_fn=loss_fn, recompute="full")
        layer = make_layer(router="gshard")
        layer.router.dropout_parts = DropoutParts({}, {}, one_generator=True)
        with pytest.raises(InputError, match=r"^router 'gshard' on tensor-parallel ranks that are threads"):
            layer(torch.zeros(1, 2, 6))

    pl.run_threads(2, rank)


@pytest.mark.parametrize(
    ("transposed", "checkpointed", "dtype", "width"),
    [
        (False, False, torch.float64, 6),
        (True, True, torch.float64, 16),
        (True, False, torch.float32, 16),  # torch's loop over groups; 6 is too narrow for it
        (False, True, torch.float32, 16),
        (False, False, torch.float32, 6),
        (False, False, torch.bfloat16, 16),
    ],
)
def test_weight_gradients_of_grouped_products_wait_for_w(transposed, checkpointed, dtype, width, monkeypatch):
    """I computes none, W computes each once, bitwise as the full backward does."""
    counts = torch.tensor([3, 0, 5])
    weight = torch.nn.Parameter(torch.randn((3, width, 8) if transposed else (3, 8, width)).to(dtype))
    bias = torch.nn.Parameter(torch.randn(8).to(dtype))
    x, seed = torch.randn(8, width).to(dtype).requires_grad_(), torch.randn(8, 8).to(dtype)

    def product(x):
        return grouped_linear.grouped_linear(x.sin(), weight, counts, transposed=transposed) + bias

    parts = [F.linear(part, w.T if transposed else w) for part, w in zip(x.sin().split([3, 0, 5]), weight, strict=True)]
    linear = torch.autograd.grad(torch.cat(parts) + bias, [x, weight, bias], seed)
    expected = torch.autograd.grad(product(x), [x, weight, bias], seed)
    calls = []
    original = grouped_linear._weights
    monkeypatch.setattr(grouped_linear, "_weights", lambda *a, **k: calls.append(1) or original(*a, **k))
    y = checkpoint(product, x, use_reentrant=False) if checkpointed else product(x)
    (of_x,), later = backward_input([root_of(y)], [seed], [x])
    assert not calls
    assert weight.grad is None
    later.accumulate()
    assert len(calls) == 1
    for got, wanted, plain in zip((of_x, weight.grad, bias.grad), expected, linear, strict=True):
        assert torch.equal(got, wanted)
        assert torch.equal(got, plain) or width == 6  # not a multiple of 16 bytes
        torch.testing.assert_close(got, plain)
    assert not weight.grad[1].any()


def _twice(weight, x, counts):
    """A weight in two products."""
    return grouped_linear.grouped_linear(grouped_linear.grouped_linear(x, weight, counts).sin(), weight, counts)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_products_add_the_gradients_of_further_microbatches_in_place(dtype):
    """``.grad`` stays where it is and gets the sum; B, and I with W, add in the same order."""
    counts = torch.tensor([3, 0, 5])
    first = torch.randn(3, 16, 16).to(dtype)
    weights = [torch.nn.Parameter(torch.randn(3, 16, 16).to(dtype)) for _ in range(2)]
    weights[1].data.copy_(weights[0].data)
    x, seed = torch.randn(8, 16).to(dtype).requires_grad_(), torch.randn(8, 16).to(dtype)
    (alone,) = torch.autograd.grad(_twice(weights[0], x, counts), [weights[0]], seed)
    for weight in weights:
        weight.grad = first.clone()
    places = [weight.grad.data_ptr() for weight in weights]
    _twice(weights[0], x, counts).backward(seed)
    _, later = backward_input([root_of(_twice(weights[1], x, counts))], [seed], [x])
    assert torch.equal(weights[1].grad, first)
    later.accumulate()
    assert torch.equal(weights[0].grad, weights[1].grad)
    assert [weight.grad.data_ptr() for weight in weights] == places
    torch.testing.assert_close(weights[0].grad, first + alone)
    assert torch.equal(weights[0].grad[1], first[1])


def _in_a_thread(weight, run):
    thread = Thread(target=run)
    thread.start()
    thread.join()


def _asked_for(weight, run):
    (found,) = torch.autograd.grad(run.args[0], [weight], run.args[1])
    weight.grad += found


def _hooked(hook_of):
    def run_with(weight, run):
        seen = []
        hook_of(weight)(lambda value: seen.append(value) and None)
        run()
        assert len(seen) == 1

    return run_with


WATCHED = {
    "another thread": _in_a_thread,
    "torch.autograd.grad": _asked_for,
    "hook": _hooked(lambda weight: weight.register_hook),
    "hook after": _hooked(lambda weight: weight.register_post_accumulate_grad_hook),
    "gradient of another layout": lambda weight, run: (
        setattr(weight, "grad", weight.grad.transpose(1, 2).contiguous().transpose(1, 2)),
        run(),
    ),
}


@pytest.mark.filterwarnings("ignore:grad and param do not obey")
@pytest.mark.parametrize("case", WATCHED)
def test_products_leave_adding_to_autograd_where_others_see_the_gradient(case, monkeypatch):
    """Bitwise what autograd adds; hooks see the gradient."""
    counts = torch.tensor([3, 0, 5])
    weight = torch.nn.Parameter(torch.randn(3, 8, 16))
    x, seed = torch.randn(8, 16), torch.randn(8, 8)
    (alone,) = torch.autograd.grad(grouped_linear.grouped_linear(x, weight, counts), [weight], seed)
    before = torch.randn_like(weight)
    weight.grad = before.clone()
    returned = []
    original = grouped_linear._weights
    monkeypatch.setattr(grouped_linear, "_weights", lambda *a, **k: returned.append(original(*a, **k)) or returned[-1])
    y = grouped_linear.grouped_linear(x, weight, counts)
    WATCHED[case](weight, partial(torch.autograd.backward, y, seed))
    assert returned[0] is not None
    assert torch.equal(weight.grad, before + alone)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_a_gradient_that_is_differentiated_is_not_added_in_place():
    weight, counts = torch.nn.Parameter(torch.randn(2, 4, 4)), torch.tensor([1, 2])
    x = torch.randn(3, 4)
    grouped_linear.grouped_linear(x, weight, counts).square().sum().backward()
    grouped_linear.grouped_linear(x, weight, counts).square().sum().backward(create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        weight.grad.square().sum().backward()


def test_a_weight_that_is_frozen_before_the_backward_gets_no_gradient():
    weight, counts = torch.nn.Parameter(torch.randn(2, 4, 4)), torch.tensor([1, 2])
    x = torch.randn(3, 4, requires_grad=True)
    grouped_linear.grouped_linear(x, weight, counts).sum().backward()
    y, before = grouped_linear.grouped_linear(x, weight, counts), weight.grad.clone()
    weight.requires_grad_(False)
    y.sum().backward()
    assert torch.equal(weight.grad, before)


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


@pytest.mark.parametrize("router", ["topk", "switch", "noisy-topk", "sigmoid"])
def test_a_new_layer_has_initial_values(router: str) -> None:
    dirty = [torch.full((4, 96, 48), torch.nan) for _ in range(50)]
    del dirty
    torch.manual_seed(0)
    layer = Experts(48, expert_width=96, experts=4, router=router, shared_experts=1, gated=True)
    torch.manual_seed(0)
    assert all(
        map(
            torch.equal,
            layer.state_dict().values(),
            type(layer)(48, expert_width=96, experts=4, router=router, shared_experts=1, gated=True)
            .state_dict()
            .values(),
        )
    )
    assert layer.gate_up.std().item() == pytest.approx(0.02 * (0.1**0.5 if router == "switch" else 1.0), rel=0.05)
    assert not (layer.router.weight.any() and router == "noisy-topk")
