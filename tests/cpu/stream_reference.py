"""What a stream is compared with: one process that applies the published update rules with explicit copies of weights.

Nothing of pipeloom is used. Stage s of P (from 0) on r_s replicas, m micro-batches a batch, makes an update of
``I_s = lcm(m, r_s)`` micro-batches. Which version micro-batch b meets follows from 1F1B by counting:

    a replica admits w_s = ceil(sum_{u >= s} r_u / r_s) - 1 micro-batches before it alternates F and B, so before its
    j-th F it has done c = max(0, j - w_s) backwards, where j = b // r_s;
    alone, it has made c // I_s updates; with others, whose gradients come while it runs its next micro-batch, it
    updates one backward later: (c - 1) // (I_s / r_s).

    stash     that version: for r_s = m = 1 it is w^(b - (P - 1 - s)), as published
    vertical  on all stages the updates that the slowest of them has seen: for r_s = m = 1 w^(b - (P - 1))
    2bw       w^(b // I_s - 1)

each clamped at 0.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call


class Rule(NamedTuple):
    """A weight policy and sizes."""

    weights: str
    replicas: tuple[int, ...]
    per_update: int = 1

    def interval(self, stage: int) -> int:
        return math.lcm(self.per_update, self.replicas[stage])

    def newest(self, stage: int, b: int) -> int:
        """The newest version that the rank of micro-batch `b` has of `stage` when it runs its F."""
        r = self.replicas[stage]
        warm_up = -(-sum(self.replicas[stage:]) // r) - 1
        done = max(0, b // r - warm_up)
        return done // self.interval(stage) if r == 1 else max(0, done - 1) // (self.interval(stage) // r)

    def version(self, stage: int, b: int) -> int:
        if self.weights == "stash":
            return self.newest(stage, b)
        if self.weights == "2bw":
            return max(0, b // self.interval(stage) - 1)
        seen = min(self.newest(s, b) * self.interval(s) for s in range(len(self.replicas)))
        return seen // self.interval(stage)


class Made(NamedTuple):
    """One update, for whoever sets its learning rate: last batch, batches in it, and delay."""

    stage: int
    update: int
    batch: int
    num_batches: int
    delay: int


@dataclass
class Outcome:
    """Parameters by stage and name; of every batch the loss; of every stage and update the norm of the gradient."""

    parameters: dict[str, Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    norms: dict[tuple[int, int], float] = field(default_factory=dict)


def train(
    stages: Sequence[nn.Module],
    rule: Rule,
    batches: Sequence[tuple[Tensor, Tensor]],
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    make_optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer],
    *,
    version: Callable[[int, int], int] | None = None,
    max_norm: float | None = None,
    learning_rate: Callable[[Made], float] | None = None,
) -> Outcome:
    """Train copies of the parameters of `stages` on `batches`; buffers of `stages` change as forwards change them.

    Args:
        version: in place of the rule's.
        max_norm: what every stage clips its own gradient to.
        learning_rate: of an update.
    """
    version = version or rule.version
    newest = [{n: nn.Parameter(p.detach().clone(), p.requires_grad) for n, p in s.named_parameters()} for s in stages]
    history = [[_copy(parameters)] for parameters in newest]
    optimizers = [make_optimizer(list(parameters.values())) for parameters in newest]
    sums: list[dict[int, dict[str, Tensor]]] = [defaultdict(dict) for _ in stages]  # by stage, replica, name
    outcome = Outcome()
    b = 0
    for inputs, targets in batches:
        loss_of_batch = 0.0
        pieces = zip(inputs.tensor_split(rule.per_update), targets.tensor_split(rule.per_update), strict=True)
        for x, y in pieces:
            used = [
                {n: p.clone().requires_grad_(newest[s][n].requires_grad) for n, p in history[s][version(s, b)].items()}
                for s in range(len(stages))
            ]
            for module, parameters in zip(stages, used, strict=True):
                x = functional_call(module, parameters, (x,))
            loss, weight = loss_fn(x, y), torch.tensor(len(y) / len(targets), dtype=x.dtype)
            loss_of_batch += float(loss.detach() * weight)
            keys = [(s, n) for s in range(len(stages)) for n, p in used[s].items() if p.requires_grad]
            leaves = [used[s][n] for s, n in keys]
            gradients = torch.autograd.grad(loss, leaves, weight, allow_unused=True)
            for (s, n), gradient in zip(keys, gradients, strict=True):
                if gradient is not None:
                    own = sums[s][b % rule.replicas[s]]
                    own[n] = gradient if n not in own else own[n] + gradient
            b += 1
            for s in range(len(stages)):
                if b % rule.interval(s) == 0:
                    held = range(b - rule.interval(s), b)
                    num_batches = len(held) // rule.per_update
                    update = held.start // len(held)
                    delay = update - min(version(s, k) for k in held)
                    made = Made(s, update, b // rule.per_update - 1, num_batches, delay)
                    if learning_rate is not None:
                        for group in optimizers[s].param_groups:
                            group["lr"] = learning_rate(made)
                    _update(newest[s], sums[s], optimizers[s], made, max_norm, outcome)
                    history[s].append(_copy(newest[s]))
        outcome.losses.append(loss_of_batch)
    outcome.parameters = {f"{s}.{n}": p.detach() for s, own in enumerate(newest) for n, p in own.items()}
    return outcome


def _update(
    parameters: dict[str, nn.Parameter],
    sums: dict[int, dict[str, Tensor]],
    optimizer: torch.optim.Optimizer,
    made: Made,
    max_norm: float | None,
    outcome: Outcome,
) -> None:
    for name, parameter in parameters.items():
        parts = [sums[replica][name] for replica in sorted(sums) if name in sums[replica]]
        parameter.grad = None
        if parts:
            parameter.grad = sum(parts[1:], parts[0]) * (1 / made.num_batches)
    norm = nn.utils.clip_grad_norm_(parameters.values(), math.inf if max_norm is None else max_norm)
    outcome.norms[made.stage, made.update] = float(norm)
    optimizer.step()
    sums.clear()


def _copy(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}
