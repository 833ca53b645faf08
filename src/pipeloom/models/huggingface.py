"""The loss of Hugging Face's causal language models, in a form that supports micro-batches and slices."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pipeloom.errors import InputError


def causal_lm_targets(labels: Tensor, *, ignore_index: int = -100) -> dict[str, Tensor]:
    """The targets of `causal_lm_loss` for a full batch.

    Args:
        labels: labels of a Hugging Face model: token ids [batch, tokens], not shifted, often the inputs themselves;
            `ignore_index` at positions without loss.
        ignore_index: the label of positions without loss.

    Returns:
        "labels" [batch, tokens], the labels shifted by one position; "weight" [batch], for every sample the number of
        all tokens divided by that of tokens with loss. The weight turns the mean over the latter, which may be spread
        unevenly over micro-batches, into a mean over all tokens. A `Pipeline` with `causal_lm_loss` extends it to the
        batches of all replicas.
    """
    shifted = F.pad(labels[:, 1:].long(), (0, 1), value=-100)
    shifted = shifted.masked_fill(shifted == ignore_index, -100)
    counting = max(1, int((shifted != -100).sum()))
    weight = torch.full((len(labels),), labels.numel() / counting, dtype=torch.float64, device=labels.device)
    return {"labels": shifted, "weight": weight}


def causal_lm_loss(output: Any, targets: Mapping[str, Tensor]) -> Tensor:
    """Cross-entropy of the next token, in nats. The mean over a batch is the loss that the model computes from labels.

    Args:
        output: of a model of transformers, with `logits` [samples, tokens, vocabulary] of a micro-batch or a slice; or
            these logits.
        targets: the same samples and tokens of the result of `causal_lm_targets`.

    Raises:
        InputError: `targets` is a tensor of labels.
    """
    if isinstance(targets, Tensor):
        raise InputError(
            "causal_lm_loss got a tensor of labels, whose normalization is known for the full batch only. Pass "
            "causal_lm_targets(labels) as targets."
        )
    logits: Tensor = output["logits"] if isinstance(output, Mapping) else output
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    labels, weight = targets["labels"], targets["weight"]
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none")
    return (losses.view_as(labels) * weight.to(losses.dtype).unsqueeze(1)).mean()


def _weigh_over_replicas(batch: Any, sum_samples: Callable[[int], int], whole: Any) -> None:
    """Turn the weights of a replica's batch into those of the batches of all replicas. The engine calls it.

    Args:
        batch: a `pipeloom.engine.batch.Batch`, whose targets are replaced.
        sum_samples: adds up a number over all replicas.
        whole: its targets with all tokens, of which a context-parallel rank has a part.
    """
    if not batch.targets or not isinstance(batch.targets[0], Mapping) or "weight" not in batch.targets[0]:
        return
    tokens = sum(target["labels"].numel() for target in whole)
    counting = sum(int((target["labels"] != -100).sum()) for target in whole)
    all_tokens, all_counting = sum_samples(tokens), sum_samples(counting)
    if (all_tokens, all_counting) != (tokens, counting):
        factor = all_tokens * max(1, counting) / (max(1, all_counting) * tokens)
        batch.targets = [{**target, "weight": target["weight"] * factor} for target in batch.targets]


causal_lm_loss.weigh = _weigh_over_replicas  # type: ignore[attr-defined]
