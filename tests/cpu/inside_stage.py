"""A GPT in every layout inside a stage, with schedules and data strategies, beside one process: used by the matrix."""

from __future__ import annotations

import math
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.models import GPT, GPTConfig, init_parameters, loss_fn
from pipeloom.parallel.placed import placed_block

SAMPLES, TOKENS, VOCABULARY = 32, 8, 31  # samples of a batch of all data-parallel replicas
UPDATES = 20


class Layout(NamedTuple):
    """How the ranks of a stage share it.

    Attributes:
        degrees: of the mesh axes inside a stage.
        options: of `pipeloom.parallelize`; None: the model is not cut.
        context: the kind of context parallelism.
        key_heads: of grouped-query attention, of 4 heads; where a layout can, ranks share them.
    """

    degrees: dict[str, int]
    options: dict[str, Any] | None = None
    context: str | None = None
    key_heads: int = 2


LAYOUTS = {
    "1d": Layout({"tp": 2}, {}, key_heads=1),
    "1d with sequence": Layout({"tp": 2}, {"sequence": True}, key_heads=1),
    "2d": Layout({"tp": 4}, {"layout": "2d"}),
    "2.5d": Layout({"tp": 8}, {"layout": "2.5d", "depth": 2}),
    "3d": Layout({"tp": 8}, {"layout": "3d"}),
    "ring": Layout({"cp": 2}, context="ring"),
    "ring-self-attention": Layout({"cp": 2}, context="ring-self-attention"),
    "ulysses": Layout({"cp": 2}, context="ulysses"),
}
FOUR_AXES = Layout({"cp": 2, "tp": 2}, {"sequence": True}, "ring", key_heads=1)
SCHEDULES: dict[str, dict[str, int]] = {
    "1f1b": {"num_microbatches": 4},
    "interleaved": {"num_microbatches": 4, "num_chunks": 2},
    "zb-v": {"num_microbatches": 4, "num_chunks": 2},
    "dualpipev": {"num_microbatches": 4, "num_chunks": 2},
    "seq1f1b": {"num_microbatches": 2, "num_slices": 2},
}
STRATEGIES = ("ddp", "zero1", "zero3")


class Case(NamedTuple):
    """One training run."""

    layout: str
    schedule: str
    data: str
    tied: bool
    grouped: bool

    @property
    def layers(self) -> int:
        """Blocks of the model: one per stage."""
        return 4 if "num_chunks" in SCHEDULES[self.schedule] else 2

    def __str__(self) -> str:
        words = [self.layout, self.schedule, self.data, "tied" if self.tied else "untied"]
        return " ".join([*words, "grouped" if self.grouped else "full"])


def grid() -> list[Case]:
    """All that is legal: sliced sequences are whole on a rank."""
    every = (Case(*values) for values in product(LAYOUTS, SCHEDULES, STRATEGIES, (False, True), (False, True)))
    return [case for case in every if case.schedule != "seq1f1b" or not LAYOUTS[case.layout].context]


class Expected(NamedTuple):
    """What one process finds.

    Attributes:
        gradients: of the first step, in float64.
        exact: losses of the first step and of the second, after an update, in float64.
        losses: of all updates, in float32.
    """

    gradients: dict[str, Tensor]
    exact: list[float]
    losses: list[float]


def make_model(*, layers: int, tied: bool, key_heads: int) -> GPT:
    """In float64, with biases, and values far larger than at the start of training: every part of a gradient counts."""
    sizes = {"vocabulary_size": VOCABULARY, "layers": layers, "width": 16, "heads": 4, "sequence_length": TOKENS}
    model = GPT(GPTConfig(**sizes, kv_heads=key_heads, tie_embeddings=tied))
    for block in model.blocks:
        for name in ("qkv", "attention_out", "mlp_up", "mlp_down"):
            linear = getattr(block, name)
            setattr(block, name, nn.Linear(linear.in_features, linear.out_features))
    model.double()
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
    """Of all data-parallel replicas together."""
    rows = torch.randint(0, VOCABULARY, (SAMPLES, TOKENS + 1), generator=torch.Generator().manual_seed(seed))
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-5)


@cache
def expected(*, layers: int, tied: bool, key_heads: int, updates: int) -> Expected:
    sizes = {"layers": layers, "tied": tied, "key_heads": key_heads}
    model = make_model(**sizes)
    loss_fn(model(batch(0)[0]), batch(0)[1]).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Expected(gradients, _losses(make_model(**sizes), 2), _losses(make_model(**sizes).float(), updates))


def _losses(model: nn.Module, steps: int) -> list[float]:
    optimizer, losses = optimizer_of(model.parameters()), []
    for step in range(steps):
        inputs, targets = batch(step)
        found = loss_fn(model(inputs), targets)
        found.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(found.item())
    return losses


def expected_of(case: Case, layout: Layout | None = None, *, updates: int = UPDATES) -> Expected:
    """Call it before threads or processes start: they share what is found."""
    return expected(**_sizes(case, layout or LAYOUTS[case.layout]), updates=updates)


def degrees_of(layout: Layout, *, dp: int) -> dict[str, int]:
    return {"pp": 2, "dp": dp, **layout.degrees}


def in_threads(case: Case, *, dp: int | None = None, updates: int = UPDATES, few: bool = False) -> None:
    """Train on two stages; and on two data-parallel replicas, unless context-parallel ranks are replicas already."""
    expected_of(case, updates=updates)
    layout = LAYOUTS[case.layout]
    degrees = degrees_of(layout, dp=dp or (1 if layout.context else 2))

    def work() -> None:
        with pl.Mesh(**degrees) as mesh:
            train_and_compare(case, mesh, updates=updates, few=few)

    pl.run_threads(size_of(degrees), work, timeout_seconds=240)


def size_of(degrees: dict[str, int]) -> int:
    return math.prod(degrees.values())


def train_and_compare(
    case: Case, mesh: pl.Mesh, layout: Layout | None = None, *, updates: int = UPDATES, few: bool = False
) -> None:
    """Fails where a rank finds another loss or gradient than one process, or another loss after updates.

    Args:
        updates: in float32; after one in float64, always.
        few: with four or eight ranks per stage, two micro-batches where the schedule has no larger minimum.
    """
    layout = layout or LAYOUTS[case.layout]
    wanted = expected_of(case, layout, updates=updates)
    sizes = SCHEDULES[case.schedule]
    if few and size_of(layout.degrees) >= 4 and case.schedule != "dualpipev":
        sizes = sizes | {"num_microbatches": 2}
    schedule = pl.schedules.build(case.schedule, num_ranks=2, **sizes)
    settings = {"loss_fn": loss_fn, "mesh": mesh, "data": case.data, "context": layout.context}

    def steps(dtype: torch.dtype, losses: list[float], tolerance: float) -> None:
        with pl.Pipeline(_made(case, layout, mesh, dtype), schedule, **settings) as pipe:
            optimizer = optimizer_of(pipe.parameters())
            for step, loss in enumerate(losses):
                own = [part.chunk(mesh.degree("dp"))[mesh.coordinate("dp")] for part in batch(step)]
                found = pipe.step(*own).item()
                assert abs(found - loss) <= tolerance * abs(loss), f"{case}: loss {step}: {found}, not {loss}"
                if dtype is torch.float64 and step == 0:
                    compare_gradients(pipe, wanted.gradients, str(case))
                pl.clip_grad_norm(pipe, 1.0)
                optimizer.step()
                optimizer.zero_grad()

    steps(torch.float64, wanted.exact, 1e-12)
    if updates:
        steps(torch.float32, wanted.losses, 1e-5)


def _sizes(case: Case, layout: Layout) -> dict[str, Any]:
    return {"layers": case.layers, "tied": case.tied, "key_heads": layout.key_heads if case.grouped else 4}


def _made(case: Case, layout: Layout, mesh: pl.Mesh, dtype: torch.dtype) -> nn.Module:
    model = make_model(**_sizes(case, layout)).to(dtype)
    return model if layout.options is None else pl.parallelize(model, mesh, **layout.options)


def compare_gradients(pipe: pl.Pipeline, wanted: dict[str, Tensor], what: str) -> None:
    """This rank's block, or shard of the block, of each gradient, relative to the largest element of the gradient."""
    names = [name for name, _ in pipe.named_parameters()]
    assert names, what
    for name, parameter in pipe.named_parameters():
        gradient, block = wanted[name], placed_block(parameter)
        scale = gradient.abs().max().item()
        if block is not None:
            gradient = block.cut(gradient)
        if name in pipe.state.ranges:
            start, stop, shape = pipe.state.ranges[name]
            assert shape == gradient.shape, f"{what}: {name}"
            gradient = gradient.flatten()[start:stop]
        if gradient.numel():
            assert parameter.grad is not None, f"{what}: {name}"
            difference = (parameter.grad - gradient).abs().max().item()
            assert difference <= 1e-12 * scale, f"{what}: gradient of {name} is off by {difference / scale:.2e}"
