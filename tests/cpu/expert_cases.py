"""A mixture in every layout of experts, with schedules, data strategies and recomputation, beside one process."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import pipeloom as pl
from pipeloom.models import GPT, GPTConfig, init_parameters, loss_fn
from pipeloom.models.experts.noisy import NoisyTopK
from pipeloom.models.experts.router import RandomRouter
from pipeloom.models.experts.settings import ROUTERS as ROUTER_KINDS
from pipeloom.models.experts.softmax_routers import Switch
from tests.cpu.inside_stage import compare_gradients, optimizer_of, size_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest
    from torch import Tensor

# Of all replicas: neither replicas nor micro-batches are equal. Capacities of expert-parallel ranks differ, too.
SAMPLES, TOKENS, VOCABULARY, MICROBATCHES = 18, 8, 31, 4
UPDATES = 10


class Sharing(NamedTuple):
    """How processes share the experts of a stage.

    Attributes:
        degrees: of the mesh, beside pp=2.
        options: of `pipeloom.parallelize`.
    """

    degrees: dict[str, int]
    options: dict[str, Any]


SHARINGS = {
    "ep 2": Sharing({"dp": 2, "ep": 2}, {}),
    "ep 4": Sharing({"dp": 4, "ep": 4}, {}),
    "ep 2 of 4": Sharing({"dp": 4, "ep": 2}, {}),
    "ep 2 tp 2": Sharing({"dp": 2, "ep": 2, "tp": 2}, {}),
    "ep 2 tp 2 sequence": Sharing({"dp": 2, "ep": 2, "tp": 2}, {"sequence": True}),
}
SCHEDULES: dict[str, dict[str, int]] = {
    "1f1b": {},
    "interleaved": {"num_chunks": 2},
    "zb-v": {"num_chunks": 2},
    "dualpipev": {"num_chunks": 2},
    "zb-h1": {},
}
STRATEGIES = ("ddp", "zero1", "zero3")
# Per router: its settings. Those of "drops" leave tokens without an expert.
ROUTERS: dict[str, dict[str, Any]] = {
    "topk": {"router": "topk", "z_loss_weight": 0.01},
    "drops": {"router": "topk", "capacity_factor": 0.6, "balance_weight": 0.1},
    "switch": {"router": "switch", "capacity_by": "sequence"},
    "gshard": {"router": "gshard", "shared_experts": 1},
    "noisy-topk": {"router": "noisy-topk"},
    "sigmoid": {"router": "sigmoid", "shared_experts": 1},
    "expert-choice": {"router": "expert-choice"},
}
UNLIMITED = ("topk", "noisy-topk", "sigmoid")


class Case(NamedTuple):
    """One training run."""

    sharing: str
    schedule: str
    data: str
    router: str
    recompute: str
    exchange: str

    @property
    def layers(self) -> int:
        """Blocks of the model: one per stage."""
        return 4 if "num_chunks" in SCHEDULES[self.schedule] else 2

    def __str__(self) -> str:
        return ", ".join(self)


def grid() -> list[Case]:
    """All that is legal: experts without a capacity cannot be sent by capacity."""
    factors = (SHARINGS, SCHEDULES, STRATEGIES, ROUTERS, ("none", "full"), ("counts", "capacity"))
    every = (Case(*values) for values in product(*factors))
    return [case for case in every if case.exchange == "counts" or case.router not in UNLIMITED]


class Expected(NamedTuple):
    """What one process finds, in float64.

    Attributes:
        gradients: of the first step.
        losses: of every update.
        auxiliary: of every update: auxiliary losses by (layer, name).
        observed: of every update: quantities by (layer, name).
    """

    gradients: dict[str, Tensor]
    losses: list[float]
    auxiliary: list[dict[tuple[str, str], float]]
    observed: list[dict[tuple[str, str], Tensor]]


def make_model(router: str, layers: int) -> GPT:
    """In float64, with values far larger than at the start of training: every part of a gradient counts."""
    sizes = {"vocabulary_size": VOCABULARY, "layers": layers, "width": 16, "heads": 4, "sequence_length": TOKENS}
    model = GPT(GPTConfig(**sizes, experts=4, expert_width=12, **ROUTERS[router])).double()
    init_parameters(model, seed=5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(8.0)
            else:
                drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
                parameter.add_(drawn, alpha=0.1)
    return model


def batch(seed: int) -> tuple[Tensor, Tensor]:
    """Of all data-parallel replicas together.

    Samples begin with other tokens, and their second token is another: equal ones have equal states, and would tie
    where experts choose tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, VOCABULARY, (SAMPLES, TOKENS + 1), generator=generator)
    rows[:, 0] = torch.randperm(VOCABULARY, generator=generator)[:SAMPLES]
    rows[:, 1] = (rows[:, 0] + 1 + rows[:, 1] % (VOCABULARY - 1)) % VOCABULARY
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


@cache
def expected(router: str, *, layers: int, replicas: int, updates: int = UPDATES) -> Expected:
    """Of a plain loop over the micro-batches of all replicas, without expert parallelism."""
    model = make_model(router, layers)
    names = {module: name for name, module in model.named_modules()}
    optimizer, found = optimizer_of(model.parameters()), Expected({}, [], [], [])
    for step in range(updates):
        total, auxiliary, observed = 0.0, Counter[Any](), dict[Any, Any]()
        for inputs, targets in _microbatches(batch(step), replicas):
            share = len(inputs) / SAMPLES
            with pl.auxiliary_losses() as collected:
                loss = loss_fn(model(inputs), targets)
            ((loss + collected.total()) * share).backward()
            total += share * loss.item()
            for each in collected.losses:
                auxiliary[names[each.module], each.name] += share * each.value.item()
            for each in collected.observed:
                key = names[each.module], each.name
                observed[key] = observed.get(key, 0) + each.values.double()
        if step == 0:
            found.gradients.update({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        for module, name in names.items():
            if hasattr(module, "after_step"):
                module.after_step({key: values for (layer, key), values in observed.items() if layer == name})
        found.losses.append(total)
        found.auxiliary.append(dict(auxiliary))
        found.observed.append(observed)
    return found


def _microbatches(pair: tuple[Tensor, Tensor], replicas: int) -> Iterator[tuple[Tensor, Tensor]]:
    for inputs, targets in zip(*(part.tensor_split(replicas) for part in pair), strict=True):
        yield from zip(inputs.tensor_split(MICROBATCHES), targets.tensor_split(MICROBATCHES), strict=True)


def expected_of(case: Case, updates: int = UPDATES) -> Expected:
    """Call it before threads or processes start: they share what is found."""
    replicas = SHARINGS[case.sharing].degrees["dp"]
    return expected(case.router, layers=case.layers, replicas=replicas, updates=updates)


def size_of_mesh(sharing: str) -> int:
    """Processes of two stages."""
    degrees = {axis: degree for axis, degree in SHARINGS[sharing].degrees.items() if axis != "ep"}
    return 2 * size_of(degrees)


def in_threads(case: Case, *, updates: int = UPDATES) -> None:
    """Train on two stages."""
    wanted = expected_of(case, updates)
    pl.run_threads(size_of_mesh(case.sharing), lambda: train_and_compare(case, wanted), timeout_seconds=120)


def train_and_compare(case: Case, wanted: Expected) -> None:
    """Fails where a rank finds another loss, gradient, auxiliary loss or quantity than one process."""
    sharing = SHARINGS[case.sharing]
    schedule = pl.schedules.build(case.schedule, num_ranks=2, num_microbatches=MICROBATCHES, **SCHEDULES[case.schedule])
    with pl.Mesh(pp=2, **sharing.degrees) as mesh:
        model = pl.parallelize(make_model(case.router, case.layers), mesh, exchange=case.exchange, **sharing.options)
        settings: dict[str, Any] = {"data": case.data, "recompute": case.recompute, "mesh": mesh}
        with pl.Pipeline(model, schedule, loss_fn=loss_fn, **settings) as pipe:
            optimizer = optimizer_of(pipe.parameters())
            for step, loss in enumerate(wanted.losses):
                own = [part.tensor_split(mesh.degree("dp"))[mesh.coordinate("dp")] for part in batch(step)]
                _compare(pipe.step(*own).item(), loss, f"{case}: loss {step}")
                if step == 0:
                    compare_gradients(pipe, wanted.gradients, str(case))
                    assert any("experts.up" in name for name, _ in pipe.named_parameters())
                _compare_observed(pipe, wanted, step, str(case))
                pl.clip_grad_norm(pipe, 1.0)
                optimizer.step()
                optimizer.zero_grad()


def _compare_observed(pipe: pl.Pipeline, wanted: Expected, step: int, what: str) -> None:
    auxiliary, observed = pipe.auxiliary_losses(), pipe.observations()
    found = {(layer, name): each.value for layer, of in auxiliary.items() for name, each in of.items()}
    assert found.keys() == wanted.auxiliary[step].keys(), what
    for key, value in found.items():
        _compare(float(value), wanted.auxiliary[step][key], f"{what}: auxiliary loss {key} of step {step}")
    quantities = {(layer, name): values for layer, of in observed.items() for name, values in of.items()}
    assert quantities.keys() == wanted.observed[step].keys(), what
    for key, values in quantities.items():
        same = torch.allclose(values, wanted.observed[step][key], rtol=1e-12, atol=1e-12)
        assert same, f"{what}: {key} of step {step}: {values}, not {wanted.observed[step][key]}"


def _compare(found: float, wanted: float, what: str) -> None:
    assert abs(found - wanted) <= 1e-12 * abs(wanted), f"{what}: {found}, not {wanted}"


def draw_equally(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let routers draw the same numbers for every micro-batch, on every thread."""

    def random(router: RandomRouter, like: Tensor) -> Tensor:
        fractions = (torch.arange(1, like.numel() + 1, dtype=like.dtype) * 0.618034).frac().view(like.shape)
        if isinstance(router, Switch):
            return 1 + router.jitter * (2 * fractions - 1)
        return 2 * fractions - 1 if isinstance(router, NoisyTopK) else fractions

    monkeypatch.setattr(RandomRouter, "random", random)
    for name, kind in list(ROUTER_KINDS.items()):
        monkeypatch.setitem(ROUTER_KINDS, name, kind._replace(draws=False))
