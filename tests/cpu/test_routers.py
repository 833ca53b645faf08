"""Every router against a reference written token by token from its paper, and cases worked by hand."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F

from pipeloom.errors import InputError
from pipeloom.models import init_parameters
from pipeloom.models.experts import ROUTERS, Experts, ExpertSettings
from pipeloom.models.experts.routers import make_router
from tests.cpu import router_reference as reference
from tests.cpu.pairwise import of_grid

WIDTH = 16


def make(name: str, experts: int = 5, **settings):
    router = make_router(WIDTH, ExpertSettings.of(experts=experts, router=name, **settings))
    init_parameters(router, seed=2)
    with torch.no_grad():
        for seed, parameter in enumerate(router.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))
    return router


def expected_groups(router, x, groups: int, seed: int) -> list[reference.Group]:
    """What the reference decides, with the random numbers that the router draws after `seed`."""
    settings, training = router.settings, router.training
    torch.manual_seed(seed)
    if settings.router == "switch" and training:
        x = x * torch.empty_like(x).uniform_(0.99, 1.01)
    logits = F.linear(x, router.weight)
    capacity = settings.capacity(len(x) // groups)
    limit = float("inf") if capacity is None else capacity
    numbers = torch.zeros(0)
    if settings.router == "gshard":
        numbers = torch.rand(len(x), dtype=x.dtype)
    if settings.router == "noisy-topk":
        std = F.softplus(F.linear(x, router.noise)) + 0.01
        numbers = torch.randn_like(logits) if training else torch.zeros_like(logits)
    found = []
    for part in torch.arange(len(x)).chunk(groups):
        own = logits[part]
        match settings.router:
            case "switch":
                found.append(reference.switch(own, limit))
            case "gshard":
                found.append(reference.gshard(own, limit, list(numbers[part]) if training else None))
            case "glam":
                found.append(reference.gshard(own, limit, None))
            case "noisy-topk":
                found.append(reference.noisy(own, std[part], numbers[part], settings.top_k))
            case "topk":
                found.append(reference.topk(own, settings.top_k, limit))
            case "sigmoid":
                found.append(reference.sigmoid(own, router.bias, settings.top_k, limit))
            case "expert-choice":
                found.append(reference.expert_choice(own, limit))
    return found


CASES = {
    "switch": {},
    "switch-tight": {"capacity_factor": 0.5},
    "switch-sequence": {"capacity_by": "sequence", "capacity_factor": 0.7},
    "gshard": {},
    "gshard-sequence": {"capacity_by": "sequence", "capacity_factor": 0.6},
    "glam": {"capacity_factor": 0.6},
    "noisy-topk": {},
    "noisy-topk-3": {"top_k": 3},
    "noisy-topk-all": {"top_k": 5},
    "topk": {},
    "topk-one": {"top_k": 1},
    "topk-all": {"top_k": 5},
    "topk-tight": {"capacity_factor": 0.5, "capacity_by": "sequence"},
    "sigmoid": {},
    "sigmoid-3": {"top_k": 3, "capacity_factor": 0.8},
    "expert-choice": {},
    "expert-choice-sequence": {"capacity_by": "sequence", "capacity_factor": 1.3},
}


@pytest.mark.parametrize(
    ("case", "dtype", "training"), of_grid(CASES, [torch.float64, torch.float32], [True, False]), ids=str
)
def test_a_router_is_its_reference(case, dtype, training):
    """Tokens, places, gates and losses; bitwise, but for sums over the tokens of several groups."""
    name = next(name for name in sorted(ROUTERS, key=len, reverse=True) if case.startswith(name))
    router = make(name, **CASES[case]).to(dtype).train(training)
    if name == "sigmoid":
        router.bias.copy_(torch.tensor([0.3, -0.2, 0.0, 0.1, -0.4]))
    x = torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(7)).to(dtype)
    groups = 3 if router.settings.capacity_by == "sequence" else 1
    expected = expected_groups(router, x, groups, seed=11)
    torch.manual_seed(11)
    routing = router(x, groups)
    size, experts = 24 // groups, router.settings.experts
    counts, tokens, gates = [], [], []
    for expert in range(experts):
        slots = [(g * size + token, gate) for g, group in enumerate(expected) for token, gate in group.slots[expert]]
        counts.append(len(slots))
        tokens += [token for token, _ in slots]
        gates += [gate for _, gate in slots]
    assert routing.counts.tolist() == counts
    assert routing.token.tolist() == tokens
    assert routing.gate.dtype == dtype
    assert torch.equal(routing.gate, torch.stack(gates))
    assert routing.observed["chosen"].tolist() == [sum(group.chosen[e] for group in expected) for e in range(experts)]
    assert routing.observed["dropped"] == routing.observed["chosen"].sum() - sum(counts)
    assert routing.observed["tokens"] == 24
    assert routing.losses.keys() == expected[0].losses.keys()
    for loss, (value, weight) in routing.losses.items():
        mean = torch.stack([group.losses[loss] for group in expected]).mean()
        torch.testing.assert_close(value, mean, rtol=0 if groups == 1 else 4 * torch.finfo(dtype).eps, atol=0)
        assert weight == {"gshard": 0.25, "glam": 0.25, "noisy-topk": 0.1}.get(name, 0.01)


def by_hand(name: str, logits: list[list[float]], **settings):
    """A router whose logits are its input."""
    rows = torch.tensor(logits, dtype=torch.float64)
    router = make_router(rows.shape[1], ExpertSettings.of(experts=rows.shape[1], router=name, **settings)).double()
    with torch.no_grad():
        router.weight.copy_(torch.eye(rows.shape[1]))
    return router, rows


def test_switch_with_overflow_by_hand():
    """Capacity ceil(6 / 2 * 1.0) = 3; tokens 0, 1, 3, 5 ask for expert 0, so token 5 is dropped."""
    log = torch.log(torch.tensor([0.9, 0.1])).tolist()
    router, x = by_hand("switch", [log, log, log[::-1], log, log[::-1], log], capacity_factor=1.0)
    routing = router.eval()(x)
    assert routing.token.tolist() == [0, 1, 3, 2, 4]
    assert routing.counts.tolist() == [3, 2]
    torch.testing.assert_close(routing.gate, torch.full((5,), 0.9, dtype=torch.float64))
    assert routing.observed["chosen"].tolist() == [4, 2]
    assert routing.observed["dropped"] == 1
    # f = (4/6, 2/6), P = ((4 * 0.9 + 2 * 0.1) / 6, (4 * 0.1 + 2 * 0.9) / 6) = (3.8 / 6, 2.2 / 6)
    assert routing.losses["balance"][0].item() == pytest.approx(2 * (4 / 6 * 3.8 / 6 + 2 / 6 * 2.2 / 6))


def test_gshard_with_overflow_by_hand():
    """Capacity ceil(2 * 4 / 3 * 0.75) = 2. First choices are 0, 0, 0, 1 and second ones 1, 1, 2, 0.

    Token 2 finds expert 0 full; token 1 finds expert 1 full, because token 3's first choice comes before it; token 3's
    second choice finds expert 0 full.
    """
    shares = [[0.6, 0.3, 0.1], [0.6, 0.3, 0.1], [0.5, 0.2, 0.3], [0.3, 0.6, 0.1]]
    router, x = by_hand("gshard", [torch.tensor(row).log().tolist() for row in shares], capacity_factor=0.75)
    routing = router.eval()(x)
    assert routing.token.tolist() == [0, 1, 3, 0, 2]
    assert routing.counts.tolist() == [2, 2, 1]
    torch.testing.assert_close(
        routing.gate, torch.tensor([2 / 3, 2 / 3, 2 / 3, 1 / 3, 3 / 8], dtype=torch.float64), rtol=1e-6, atol=0
    )
    assert routing.observed["dropped"] == 3
    # c / S = (3/4, 1/4, 0), m = (0.5, 0.35, 0.15)
    assert routing.losses["balance"][0].item() == pytest.approx((0.75 * 0.5 + 0.25 * 0.35) / 3)


def test_a_second_choice_of_gshard_is_sent_with_twice_its_gate():
    rows = torch.tensor([0.8, 0.2, 1e-9]).log().tolist()
    router, x = by_hand("gshard", [rows] * 20000, capacity_factor=10.0)
    torch.manual_seed(0)
    counts = router(x).counts.tolist()
    assert counts[0] == 20000
    assert counts[1] / 20000 == pytest.approx(0.4, abs=0.015)


def test_expert_choice_by_hand():
    """Each expert takes ceil(1 * 3 / 3) = 1 token: experts 0 and 1 take token 0, expert 2 token 1, and none token 2."""
    shares = [[0.5, 0.4, 0.1], [0.2, 0.3, 0.5], [0.4, 0.35, 0.25]]
    router, x = by_hand("expert-choice", [torch.tensor(row).log().tolist() for row in shares], capacity_factor=1.0)
    routing = router(x)
    assert routing.token.tolist() == [0, 0, 1]
    assert routing.counts.tolist() == [1, 1, 1]
    assert routing.observed["untaken"] == 1
    assert routing.observed["dropped"] == 0
    torch.testing.assert_close(routing.gate, torch.tensor([0.5, 0.4, 0.5], dtype=torch.float64))


def test_the_bias_of_sigmoid_moves_against_the_load():
    layer = Experts(4, experts=4, expert_width=4, router="sigmoid")
    layer.after_step({"chosen": torch.tensor([10, 2, 6, 6])})
    layer.after_step({"chosen": torch.tensor([9, 3, 7, 5])})
    torch.testing.assert_close(layer.router.bias, torch.tensor([-0.002, 0.002, -0.001, 0.001]))
    twin = copy.deepcopy(layer).to(torch.bfloat16)
    assert twin.router.bias.dtype == torch.float32
    twin.after_step({"chosen": torch.tensor([0, 4, 4, 4])})
    torch.testing.assert_close(twin.router.bias, torch.tensor([-0.001, 0.001, -0.002, 0.0]))
    assert layer.router.bias[0] == torch.tensor(-0.002)
    assert "router.bias" in layer.state_dict()


@pytest.mark.parametrize("name", ROUTERS)
def test_gates_and_losses_have_gradients_to_the_router_and_its_tokens(name):
    router = make(name, z_loss_weight=0.1).double()
    x = torch.randn(12, WIDTH, dtype=torch.float64, requires_grad=True)

    def total(tokens):
        torch.manual_seed(3)
        routing = router(tokens)
        return routing.gate.square().sum() + sum(value * weight for value, weight in routing.losses.values())

    gradients = torch.autograd.grad(total(x), [x, *router.parameters()])
    assert all(gradient.abs().sum() > 0 for gradient in gradients)
    direction = torch.randn_like(x)
    with torch.no_grad():
        slope = (total(x + 1e-6 * direction) - total(x - 1e-6 * direction)) / 2e-6
    assert slope.item() == pytest.approx((gradients[0] * direction).sum().item(), rel=1e-5)


@pytest.mark.parametrize("name", sorted(set(ROUTERS) - {"gshard", "glam"}))
def test_one_expert_takes_all_tokens(name):
    layer = Experts(WIDTH, experts=1, expert_width=8, router=name, top_k=1).double()
    init_parameters(layer, seed=0)
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64)
    expected = F.gelu(x @ layer.up[0].T) @ layer.down[0].T
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", ROUTERS)
def test_gates_are_float32_in_bfloat16_and_under_autocast(name):
    layer = Experts(WIDTH, experts=4, expert_width=8, router=name)
    init_parameters(layer, seed=0)
    x = torch.randn(2, 6, WIDTH)
    for own, tokens, enabled in ((layer, x, True), (copy.deepcopy(layer).bfloat16(), x.bfloat16(), False)):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            routing = own.router(tokens.flatten(0, 1))
            result = own(tokens)
        assert routing.gate.dtype == torch.float32
        assert result.dtype == torch.bfloat16
        result.float().sum().backward()
        assert all(parameter.grad is not None for parameter in own.parameters())
        torch.manual_seed(0)
        exact = layer.eval()(x)
        own.eval()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            torch.testing.assert_close(own(tokens).float(), exact, rtol=0.1, atol=0.02 * exact.abs().max().item())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"top_k": 5}, r"^top_k=5: must be at most experts=4. Use top_k=4 or less\.$"),
        ({"experts": 1}, r"^top_k=2, the default of router 'topk': .* Use more experts, or top_k=1\.$"),
        ({"experts": 1, "router": "gshard"}, r"^experts=1: router 'gshard' needs at least 2"),
        ({"router": "switch", "top_k": 2}, r"^top_k=2: router 'switch' sends a token to 1 expert\. "),
        ({"capacity_factor": 0.0}, r"^capacity_factor=0.0: must be more than 0\. "),
        ({"capacity_factor": float("nan")}, r"^capacity_factor=nan: must be more than 0\. "),
        ({"top_k": 0}, r"^top_k=0: must be at least 1\.$"),
        ({"experts": 0}, r"^experts=0: must be at least 1\.$"),
        ({"router": "hash"}, r"^router='hash': must be one of switch, "),
        ({"balance_weight": -1.0}, r"^balance_weight=-1.0: must be 0 or more\.$"),
        (
            {"router": "sigmoid", "balance_weight": 0.1},
            r"^balance_weight=0.1: router 'sigmoid' balances without",
        ),
        ({"shared_experts": -1}, r"^shared_experts=-1: must be 0 or more\.$"),
        ({"expert_width": 0}, r"^expert_width=0: must be at least 1\.$"),
        ({"expert_width": 2.5}, r"^expert_width=2\.5: must be an integer, at least 1\.$"),
        ({"top_k": True}, r"^top_k=True: must be an integer, at least 1\.$"),
        ({"experts": 4.0}, r"^experts=4\.0: must be an integer, at least 1\.$"),
        ({"capacity_by": "token"}, r"^capacity_by='token': must be one of batch, sequence\.$"),
        ({"capacity_factor": "2"}, r"^capacity_factor='2': must be more than 0\. "),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        Experts(8, **{"experts": 4, "expert_width": 8, **settings})


def test_capacity_is_exact():
    """1.1 * 40 / 4 is 11.000000000000002 in floating point."""
    assert ExpertSettings.of(experts=4, router="switch", capacity_factor=1.1).capacity(40) == 11
    assert ExpertSettings.of(experts=4, capacity_factor=0.01).capacity(8) == 1
    assert ExpertSettings.of(experts=4, router="expert-choice", capacity_factor=100.0).capacity(8) == 8


def test_noise_that_is_almost_none_has_finite_gradients():
    router = make("noisy-topk")
    with torch.no_grad():
        router.noise.fill_(-100.0)
    routing = router(torch.rand(12, WIDTH) + 0.5)
    sum(value * weight for value, weight in routing.losses.values()).backward()
    assert router.noise.grad.isfinite().all()
    assert router.weight.grad.isfinite().all()


@pytest.mark.parametrize("name", ["switch", "expert-choice"])
def test_an_empty_batch_passes(name):
    layer = Experts(WIDTH, experts=4, expert_width=8, router=name, capacity_by="sequence")
    assert layer(torch.empty(0, 3, WIDTH)).shape == (0, 3, WIDTH)
    assert layer(torch.empty(2, 0, WIDTH)).shape == (2, 0, WIDTH)
