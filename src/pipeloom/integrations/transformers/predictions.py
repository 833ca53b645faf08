"""The losses and predictions of a batch, from the outputs of the last stage."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.trainer_pt_utils import nested_concat, nested_detach

from pipeloom.integrations.transformers.micro_batches import MicroBatch, num_samples, rows, samples_of_replica
from pipeloom.integrations.transformers.stage_forward import StageLoss


class Predicted(NamedTuple):
    """What one replica predicts for its part of a batch.

    Attributes:
        loss: its part of the loss of the batch; None: it has none.
        logits: outputs of its samples; None: not wanted, or it has no samples.
    """

    loss: Tensor | None
    logits: Any


def labels_of(inputs: Mapping[str, Any], names: Sequence[str], *, returns_loss: bool) -> tuple[bool, Any]:
    """Whether the model computes a loss for a batch, and its labels, as Trainer decides.

    Args:
        names: of the labels.
        returns_loss: whether the model computes a loss without labels, unless the batch says so.
    """
    given = inputs.get("return_loss")
    with_loss = all(inputs.get(name) is not None for name in names) if names else bool(given or returns_loss)
    labels: Any = nested_detach(tuple(inputs.get(name) for name in names)) if with_loss else None
    return with_loss, labels[0] if labels is not None and len(labels) == 1 else labels


def predicted(
    output: Any,
    batch: Mapping[str, Any],
    labels: Any,
    pieces: Sequence[MicroBatch],
    loss: StageLoss,
    *,
    replica: tuple[int, int],
    preprocess: Callable[[Any, Any], Any] | None,
    loss_only: bool,
) -> Predicted:
    """What a replica predicts, on a process with its last stage.

    Args:
        output: of `Pipeline.forward`; None on other processes.
        batch, labels: of all replicas.
        pieces: the micro-batches of this replica.
        replica: its number, and how many there are.
        preprocess: ``preprocess_logits_for_metrics`` of Trainer.
        loss_only: whether no logits are wanted.
    """
    if output is None:
        return Predicted(None, None)
    own = sum(piece.num_samples for piece in pieces if piece.share is not None)
    part = loss.of_evaluation(output).cpu() if "loss" in output else None
    if loss_only or not own:
        return Predicted(part, None)
    run = sum(piece.num_samples for piece in pieces)
    outputs = rows({"outputs": output["outputs"]}, run, 0, own)["outputs"]
    logits: Any = tuple(outputs.values()) if isinstance(outputs, dict) else outputs
    logits = logits[0] if isinstance(logits, tuple) and len(logits) == 1 else logits
    if preprocess is not None:
        length = num_samples(batch)
        span = samples_of_replica(length, *replica)
        logits = preprocess(logits, rows({"labels": labels}, length, span.start, span.stop)["labels"])
    return Predicted(part, logits)


def of_all_replicas(parts: Sequence[Predicted]) -> tuple[Tensor | None, Any]:
    """The loss of a batch and its predictions, from those of all replicas in order."""
    losses = [part.loss for part in parts if part.loss is not None]
    loss = torch.stack(losses).sum().float() if losses else None
    logits: Any = None
    for part in parts:
        if part.logits is not None:
            logits = part.logits if logits is None else nested_concat(logits, part.logits, padding_index=-100)
    return loss, logits
