"""The metrics of a step that the model's layers declare: auxiliary losses, and what routers of experts observe."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pipeloom.training.observations import AuxiliaryValue

_PER_ASSIGNMENT = ("dropped",)  # other quantities are means over the tokens


def declared_metrics(
    losses: Mapping[str, Mapping[str, AuxiliaryValue]], quantities: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, Any]:
    """The keys of a row of metrics.

    Args:
        losses: by layer and name, as of `Pipeline.auxiliary_losses`.
        quantities: by layer and name, as of `Pipeline.observations`.

    Returns:
        "auxiliary_loss", what the losses add to the loss that is trained; and "experts", by layer: "load", the tokens
        of each expert over their mean; "dropped", the fraction of assignments over capacity; "entropy" of the gates of
        a token in nats, and other means over the tokens; and each loss under its name with "_loss". No keys for a model
        that declares nothing.
    """
    row: dict[str, Any] = {}
    if losses:
        row["auxiliary_loss"] = sum(loss.weighted for of_layer in losses.values() for loss in of_layer.values())
    layers = {layer: _expert_layer(found) for layer, found in quantities.items() if "chosen" in found}
    for layer, values in layers.items():
        values.update({f"{name}_loss": loss.value for name, loss in losses.get(layer, {}).items()})
    if layers:
        row["experts"] = layers
    return row


def _expert_layer(found: Mapping[str, Tensor]) -> dict[str, Any]:
    chosen = found["chosen"]
    assignments, tokens = chosen.sum().item(), found["tokens"].item() if "tokens" in found else 0.0
    values: dict[str, Any] = {"load": (chosen / chosen.mean() if assignments else chosen).tolist()}
    for name, total in found.items():
        whole = assignments if name in _PER_ASSIGNMENT else tokens
        if name not in ("chosen", "tokens") and total.numel() == 1 and whole:
            values[name] = total.item() / whole
    return values
