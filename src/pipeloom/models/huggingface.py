"""The loss of Hugging Face's causal language models, in two parts that can be cut into micro-batches and slices."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from pipeloom.errors import InputError


def causal_lm_targets(labels: Tensor, *, ignore_index: int = -100) -> dict[str, Tensor]:
    """What `causal_lm_loss` reads, of a whole batch: every position's next token, and how much a token counts.

    Args:
        labels: as Hugging Face's models take them: token ids [batch, tokens], not shifted, often the inputs themselves;
            `ignore_index` where nothing is to be learnt.
        ignore_index: the label that does not count.

    Returns:
        "labels" [batch, tokens], one position on; "weight" [batch], the same number for every sample: tokens in all
        over tokens that count. It makes the mean over counting tokens, wherever they are, a mean over all.
    """
    shifted = F.pad(labels[:, 1:].long(), (0, 1), value=-100)
    shifted = shifted.masked_fill(shifted == ignore_index, -100)
    counting = max(1, int((shifted != -100).sum()))
    weight = torch.full((len(labels),), labels.numel() / counting, dtype=torch.float64, device=labels.device)
    return {"labels": shifted, "weight": weight}


def causal_lm_loss(logits: Tensor, targets: Mapping[str, Tensor]) -> Tensor:
    """Cross entropy of the next token, in nats: over a batch, the loss that the model itself computes from labels.

    Args:
        logits: [samples, tokens, vocabulary] of a micro-batch or a slice.
        targets: the same samples and tokens of `causal_lm_targets`.

    Raises:
        InputError: `targets` are bare labels.
    """
    if isinstance(targets, Tensor):
        raise InputError(
            "causal_lm_loss got bare labels: which token is next and how many count is known for a whole batch only; "
            "pass causal_lm_targets(labels) as targets"
        )
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    labels, weight = targets["labels"], targets["weight"]
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none")
    return (losses.view_as(labels) * weight.to(losses.dtype).unsqueeze(1)).mean()
