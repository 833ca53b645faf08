"""Attention and training of several context-parallel ranks, and of one process: used by the tests of both."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.models import GPT, GPTConfig, init_parameters, loss_fn
from pipeloom.parallel.context import ContextParallel
from pipeloom.slicing import attention
from pipeloom.transport.thread_members import run_threads

B, S, D = 2, 24, 8
MASKS = ("none", "padding", "documents", "both", "window")


class Heads(NamedTuple):
    query: int
    key: int


class Problem:
    """Queries, keys and values of whole sequences, and what one process finds."""

    def __init__(self, heads: Heads, *, causal: bool, masks: str, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(3)
        sizes = (heads.query, heads.key, heads.key, heads.query)
        drawn = [torch.randn(B, size, S, D, dtype=torch.float64, generator=generator).to(dtype) for size in sizes]
        self.values, self.d_out = drawn[:3], drawn[3]
        self.causal, self.scale = causal, 0.5
        self.window = 7 if masks == "window" else None
        self.marks: dict[str, Any] = {"length": S}
        position = torch.arange(S)
        allowed = torch.ones(B, 1, S, S, dtype=torch.bool)
        if causal:
            allowed &= position[:, None] >= position
        if self.window is not None:
            allowed &= position[:, None] - position < self.window
        if masks in ("padding", "both"):
            kept = torch.ones(B, S, dtype=torch.long)
            kept[0, :5] = kept[1, -7:] = 0  # the first queries of one sequence see nothing
            allowed &= kept.bool()[:, None, None]
            self.marks["attention_mask"] = kept
        if masks in ("documents", "both"):
            documents = torch.stack([(position >= 3).long() + (position >= 13), 5 * (position >= 11)])
            allowed &= (documents[:, :, None] == documents[:, None])[:, None]
            self.marks["document_ids"] = documents
        self.allowed = allowed

    def alone(self) -> list[Tensor]:
        """Output and gradients of q, k and v, by matrix products and softmax."""
        q, k, v = (value.detach().requires_grad_() for value in self.values)
        keys, values = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        scores = (q @ keys.mT * self.scale).masked_fill(~self.allowed, torch.finfo(q.dtype).min / 2)
        out = (scores.softmax(-1) * self.allowed) @ values
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), self.d_out)]

    def together(self, kind: str, degree: int) -> tuple[list[Tensor], dict[str, int]]:
        """The same on the ranks of a mesh, gathered; and the bytes sent in the forward and in all."""
        mesh = pl.Mesh(cp=degree)
        context = ContextParallel(mesh.axis("cp"), kind)
        q, k, v = (context.cut(value, 2).requires_grad_() for value in self.values)
        tokens = context.tokens(self.marks)
        out = tokens.attend(q, k, v, causal=self.causal, scale=self.scale, window=self.window)
        forward = sum(traffic.num_bytes for traffic in mesh.meter.traffic.values())
        gradients = torch.autograd.grad(out, (q, k, v), context.cut(self.d_out, 2))
        both = sum(traffic.num_bytes for traffic in mesh.meter.traffic.values())
        found = [context.gather(value.detach(), 2) for value in (out, *gradients)]
        return found, {"forward": forward, "backward": both - forward}


def error(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference, relative to the largest element of each tensor."""
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True))


def attends(kind: str, degree: int, problem: Problem) -> None:
    """Fails where attention of several ranks is not that of one process."""
    expected = problem.alone()
    for found, _ in run_threads(degree, partial(problem.together, kind, degree)):
        assert error(found, expected) < 1e-12


# Training


def make_gpt(*, seed: int = 5, **changes: Any) -> GPT:
    """A small GPT in float64 whose attention is far from even."""
    settings: dict[str, Any] = {"layers": 4, "width": 16, "heads": 4, "tie_embeddings": True, "sequence_length": S}
    model = GPT(GPTConfig(vocabulary_size=32, **{**settings, **changes})).double()
    init_parameters(model, seed=seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(12)
    return model


def batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 32, (4, S + 1), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class Trained(NamedTuple):
    """Two steps of gradient descent: losses, then the output of the trained model, and its parameters."""

    losses: list[float]
    output: Tensor | None
    values: dict[str, Tensor]


def train_alone(model: nn.Module) -> Trained:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    inputs, targets = batch()
    for _ in range(2):
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        output = model(inputs)
    losses.append(loss_fn(output, targets).item())
    return Trained(losses, output, dict(model.state_dict()))


def train_together(
    model: nn.Module,
    family: str,
    degrees: dict[str, int],
    context: str | None,
    inputs: Any = None,
    prepare: Callable[[nn.Module, pl.Mesh], nn.Module] = lambda model, mesh: model,
    **options: Any,
) -> Trained:
    """The same with a pipeline on a mesh; on every rank, the parameters of its stages.

    Args:
        inputs: makes the inputs of the batch from its token ids.
        prepare: called with the model and the mesh before the pipeline is made.
    """
    mesh = pl.Mesh(**degrees)
    model = prepare(model, mesh)
    replicas, replica = mesh.degree("dp"), mesh.coordinate("dp")
    schedule = pl.schedules.build(family, num_ranks=mesh.degree("pp"), num_microbatches=4 // replicas)
    x, y = (value.chunk(replicas)[replica] for value in batch())
    x = x if inputs is None else inputs(x)
    losses = []
    with pl.Pipeline(model, schedule, loss_fn=loss_fn, mesh=mesh, context=context, **options) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.5)
        for _ in range(2):
            optimizer.zero_grad()
            losses.append(pipe.step(x, y).item())
            optimizer.step()
        losses.append(pipe.evaluate(x, y).item())
        return Trained(losses, pipe.forward(x), dict(pipe.state_dict()))


def differences(found: Trained, expected: Trained, replica: int, replicas: int) -> Iterator[float]:
    """Relative, of losses, outputs and parameters."""
    yield max(abs(a - b) for a, b in zip(found.losses, expected.losses, strict=True))
    if found.output is not None:
        assert expected.output is not None
        yield error([found.output], [expected.output.chunk(replicas)[replica]])
    for name, value in found.values.items():
        yield error([value], [expected.values[name]])


def trains(
    make: Callable[[], nn.Module],
    family: str,
    degrees: dict[str, int],
    kind: str | None,
    *,
    expected: Trained | None = None,
    inputs: Any = None,
    **options: Any,
) -> None:
    """Fails where `train_together` is not `train_alone`."""
    wanted = train_alone(make()) if expected is None else expected

    def run() -> float:
        found = train_together(make(), family, degrees, kind, inputs, **options)
        return max(differences(found, wanted, pl.Mesh(**degrees).coordinate("dp"), degrees.get("dp", 1)))

    assert max(run_threads(math.prod(degrees.values()), run)) < 1e-12


class Both(nn.Module):
    """Attention to earlier and later tokens, in place of a block of a GPT."""

    sliceable = True

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48, dtype=torch.float64)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        return x + attention(q, k, v, self, causal=False).transpose(1, 2).flatten(2)


def make_both() -> nn.Sequential:
    torch.manual_seed(1)
    embedding, head = nn.Embedding(32, 16, dtype=torch.float64), nn.Linear(16, 32, dtype=torch.float64)
    return nn.Sequential(embedding, Both(), Both(), head)
