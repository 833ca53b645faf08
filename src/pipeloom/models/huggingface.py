"""The loss of Hugging Face's causal language models, in a form that supports micro-batches and slices."""

from collections.abc import Mapping, Sequence
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
        unevenly over micro-batches, into a mean over all tokens. A `Pipeline` extends it to the batches of all
        replicas, also for a loss_fn that calls `causal_lm_loss` and returns metrics with it.
    """
    shifted = F.pad(labels[:, 1:].long(), (0, 1), value=-100)
    shifted = shifted.masked_fill(shifted == ignore_index, -100)
    counting = max(1, int((shifted != -100).sum()))
    weight = torch.full((len(labels),), labels.numel() / counting, dtype=torch.float64, device=labels.device)
    return _CausalTargets({"labels": shifted, "weight": weight})


def causal_lm_loss(output: Any, targets: Mapping[str, Tensor] | Tensor) -> Tensor:
    """Cross-entropy of the next token, in nats. The mean over a batch is the loss that the model computes from labels.

    Args:
        output: of a model of transformers, with `logits` [samples, tokens, vocabulary] of a micro-batch or a slice; or
            these logits.
        targets: the same samples and tokens of the result of `causal_lm_targets`. A `Pipeline` makes it of labels that
            are given alone.

    Raises:
        InputError: `targets` is a tensor of labels, outside of a pipeline.
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


def _prepare(targets: Any) -> Any:
    return causal_lm_targets(targets) if isinstance(targets, Tensor) else targets


def _count(whole: Sequence[Any]) -> tuple[int, int]:
    """Tokens of a replica's batch, and those with loss; `whole`: targets of its micro-batches, with whole sequences."""
    if not whole or not isinstance(whole[0], Mapping) or "weight" not in whole[0]:
        return 0, 0
    return sum(t["labels"].numel() for t in whole), sum(int((t["labels"] != -100).sum()) for t in whole)


def _weigh(batch: Any, whole: Sequence[Any], counts: tuple[int, int]) -> None:
    """Turn the weights of a replica's `pipeloom.engine.batch.Batch` into those of all replicas, which have `counts`."""
    (tokens, counting), (all_tokens, all_counting) = _count(whole), counts
    if tokens and (all_tokens, all_counting) != (tokens, counting):
        factor = all_tokens * max(1, counting) / (max(1, all_counting) * tokens)
        batch.targets = [{**target, "weight": target["weight"] * factor} for target in batch.targets]


class _CausalTargets(dict[str, Tensor]):
    """Targets that a pipeline weighs over replicas, whatever function computes the loss from them."""

    count = staticmethod(_count)
    weigh = staticmethod(_weigh)


causal_lm_loss.prepare = _prepare  # type: ignore[attr-defined]  # a pipeline calls them before a batch runs
causal_lm_loss.count = _count  # type: ignore[attr-defined]
causal_lm_loss.weigh = _weigh  # type: ignore[attr-defined]
