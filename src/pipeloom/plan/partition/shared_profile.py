"""The profile of layers that several processes share, from that of one process."""

from dataclasses import replace

from pipeloom.errors import InputError
from pipeloom.plan.architecture import Architecture
from pipeloom.plan.memory import transformer_layers
from pipeloom.plan.partition.profile import LayerProfile, Profile
from pipeloom.plan.shared_layers import ELEMENT, Shared, SharedLayers


def is_gpt(profile: Profile) -> bool:
    """Whether the layers have the names of pipeloom's GPT: embedding, blocks.0, ..., norm, head."""
    names = [layer.name for layer in profile.layers]
    return names == ["embedding", *(f"blocks.{index}" for index in range(len(names) - 3)), "norm", "head"]


def samples_of(profile: Profile, model: Architecture) -> int:
    """Sequences per micro-batch of a profile of `model`, from the bytes of a block's output.

    Raises:
        InputError: it is no profile of this model.
    """
    blocks = len(profile.layers) - 3
    if not is_gpt(profile):
        raise InputError(
            "the profile has other layers than embedding, blocks.N, norm and head of a GPT, so what processes that "
            "share a stage send is unknown. Remove --tensor and --context."
        )
    if blocks != model.layers:
        raise InputError(
            f"--model.layers={model.layers}: the profile has {blocks} blocks. Add --model.layers {blocks}."
        )
    sample = model.sequence_length * model.width * ELEMENT
    found = profile.layers[1].activation_bytes / sample if blocks else 0.0
    if found < 1 or found != int(found):
        raise InputError(
            f"--model.sequence_length={model.sequence_length}, --model.width={model.width}: outputs of blocks have "
            f"{sample:,} bytes per sequence, and the profile has {profile.layers[1].activation_bytes:,.0f}: must be a "
            "multiple. Add the sizes of the profiled model."
        )
    return int(found)


def share_profile(profile: Profile, layers: SharedLayers) -> Profile:
    """Times and sizes of one of the processes that share each stage.

    Args:
        profile: of a GPT on one process, with the layers of `is_gpt`.
        layers: its sizes, and the processes.
    """
    alone, shared = (
        [sum(each.parameter_sizes.values()) for each in transformer_layers(layers.model, 1, ELEMENT, inside)]
        for inside in (None, layers.inside)
    )
    parts = [of / whole for of, whole in zip(shared, alone, strict=True)]
    blocks = [
        layers.block(each.forward_seconds, experts=layers.model.has_experts(index))
        for index, each in enumerate(profile.layers[1:-2])
    ]
    changes = [layers.embedding(), *blocks, layers.norm(), layers.head()]
    sent = [layers.message_part] * (len(blocks) + 2) + [1 / layers.inside.processes]
    rows = zip(profile.layers, changes, sent, parts, strict=True)
    return replace(
        profile,
        layers=tuple(_changed(*row) for row in rows),
        ties=tuple(tie._replace(size=tie.size * parts[tie.layers[-1]]) for tie in profile.ties),  # of the head alone
    )


def _changed(layer: LayerProfile, change: Shared, sent: float, kept: float) -> LayerProfile:
    return replace(
        layer,
        forward_seconds=layer.forward_seconds * change.part + change.forward,
        backward_seconds=layer.backward_seconds * change.part + change.backward,
        activation_bytes=layer.activation_bytes * sent,
        parameter_bytes=layer.parameter_bytes * kept,
        kept_bytes=None,
    )
