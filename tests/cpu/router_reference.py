"""Routers written token by token, as the papers' algorithms read: slow and plain.

Each function takes the logits of one group of tokens, [tokens, experts], and returns a `Group`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Group:
    """What a router decides for a group: by expert, its tokens with their gates, in order; and the losses."""

    slots: list[list[tuple[int, Tensor]]]
    chosen: list[int]
    losses: dict[str, Tensor]


def _softmax(logits: Tensor) -> list[Tensor]:
    return [torch.softmax(row, 0) for row in logits]


def _mean(rows: list[Tensor]) -> Tensor:
    return torch.stack(rows).sum(0) / len(rows)


def _best(row: Tensor, k: int) -> list[int]:
    return sorted(range(len(row)), key=lambda e: -row[e].item())[:k]


def switch(logits: Tensor, capacity: int) -> Group:
    """Switch Transformer, section 2.2: one expert per token; loss of equations 4 to 6."""
    experts = logits.shape[1]
    slots: list[list[tuple[int, Tensor]]] = [[] for _ in range(experts)]
    chosen = [0] * experts
    shares = _softmax(logits)
    for token, share in enumerate(shares):
        (expert,) = _best(share, 1)
        if chosen[expert] < capacity:
            slots[expert].append((token, share[expert]))
        chosen[expert] += 1
    f = torch.tensor([count / len(shares) for count in chosen], dtype=logits.dtype)
    return Group(slots, chosen, {"balance": experts * (f * _mean(shares)).sum()})


def gshard(logits: Tensor, capacity: int, drawn: list[Tensor] | None) -> Group:
    """GShard, algorithm 1; `drawn` are its random numbers, None: every second choice is sent (GLaM)."""
    experts = logits.shape[1]
    slots: list[list[tuple[int, Tensor]]] = [[] for _ in range(experts)]
    taken, first = [0] * experts, [0] * experts
    shares = _softmax(logits)
    for token, share in enumerate(shares):
        one, two = _best(share, 2)
        gate = share[one] / (share[one] + share[two])
        if taken[one] < capacity:
            slots[one].append((token, gate))
        taken[one] += 1
        first[one] += 1
    for token, share in enumerate(shares):
        one, two = _best(share, 2)
        gate = share[two] / (share[one] + share[two])
        if drawn is None or 2 * gate > drawn[token]:
            if taken[two] < capacity:
                slots[two].append((token, gate))
            taken[two] += 1
    c = torch.tensor([count / len(shares) for count in first], dtype=logits.dtype)
    return Group(slots, taken, {"balance": (c * _mean(shares)).sum() / experts})


def topk(logits: Tensor, k: int, capacity: float) -> Group:
    """Mixtral, section 2.1: softmax, `k` largest gates, normalized; all tokens' first choices first."""
    experts = logits.shape[1]
    slots: list[list[tuple[int, Tensor]]] = [[] for _ in range(experts)]
    chosen = [0] * experts
    shares = _softmax(logits)
    for choice in range(k):
        for token, share in enumerate(shares):
            best = _best(share, k)
            if chosen[best[choice]] < capacity:
                slots[best[choice]].append((token, share[best[choice]] / share[best].sum()))
            chosen[best[choice]] += 1
    f = torch.tensor([count / (k * len(shares)) for count in chosen], dtype=logits.dtype)
    return Group(slots, chosen, {"balance": experts * (f * _mean(shares)).sum()})


def noisy(clean: Tensor, std: Tensor, normal: Tensor, k: int) -> Group:
    """Shazeer et al., section 2.1, equations 3 to 5, and appendix A, equations 8 to 11."""
    tokens, experts = clean.shape
    slots: list[list[tuple[int, Tensor]]] = [[] for _ in range(experts)]
    chosen = [0] * experts
    gates, probabilities = [], []
    noisy_logits = clean + normal * std
    best = [_best(row, k) for row in noisy_logits]
    for token, row in enumerate(noisy_logits):
        kept = torch.softmax(row[best[token]], 0)
        gates.append(torch.zeros(experts, dtype=clean.dtype))
        gates[token][best[token]] = kept
        p = []
        for expert in range(experts):
            others = sorted((row[e] for e in range(experts) if e != expert), key=lambda value: -value.item())
            if len(others) < k:
                p.append(torch.ones((), dtype=clean.dtype))
                continue
            z = (clean[token, expert] - others[k - 1]) / std[token, expert]
            p.append(0.5 * (1 + torch.erf(z / math.sqrt(2))))
        probabilities.append(torch.stack(p))
    for choice in range(k):
        for token in range(tokens):
            expert = best[token][choice]
            slots[expert].append((token, gates[token][expert]))
            chosen[expert] += 1
    losses = {"importance": _squared_variation(gates)}
    if k < experts:
        losses["load"] = _squared_variation(probabilities)
    return Group(slots, chosen, losses)


def _squared_variation(rows: list[Tensor]) -> Tensor:
    total = torch.stack(rows).sum(0)
    return total.var(correction=0) / (total.mean().square() + 1e-10)


def sigmoid(logits: Tensor, bias: Tensor, k: int, capacity: float) -> Group:
    """DeepSeek-V3, equations 13 to 16: the bias chooses, the gates are without it."""
    experts = logits.shape[1]
    slots: list[list[tuple[int, Tensor]]] = [[] for _ in range(experts)]
    chosen = [0] * experts
    for choice in range(k):
        for token, score in enumerate(torch.sigmoid(logits)):
            best = _best(score + bias, k)
            if chosen[best[choice]] < capacity:
                slots[best[choice]].append((token, score[best[choice]] / (score[best].sum() + 1e-20)))
            chosen[best[choice]] += 1
    return Group(slots, chosen, {})


def expert_choice(logits: Tensor, capacity: int) -> Group:
    """Expert choice, section 3.2: each expert takes its `capacity` best tokens."""
    shares = _softmax(logits)
    slots = []
    for expert in range(logits.shape[1]):
        tokens = sorted(range(len(shares)), key=lambda token: -shares[token][expert].item())
        slots.append([(token, shares[token][expert]) for token in tokens[:capacity]])
    return Group(slots, [capacity] * logits.shape[1], {})
