"""The units of a profile file: layers with the seconds and bytes that the search for plans asks for. No torch here."""

from collections.abc import Sequence

from pipeloom.plan.partition.plans import counted_layers
from pipeloom.plan.partition.profile import Profile
from pipeloom.plan.profiled_costs import Unit, UnitRow, together


def units_of(profile: Profile, samples: int, element: int) -> list[Unit]:
    """The layers of a profile, each that a cut counts with its neighbours that no cut counts.

    Without `kept_bytes`, a forward keeps the output of every layer. The size of the model's input is unknown, so the
    first layer keeps as much with recomputation as without.

    Args:
        profile: layers in the order in which they run.
        samples: per micro-batch of the profile.
        element: bytes of a number of its parameters.
    """
    kept = kept_bytes(profile)
    sent, received = _sent(profile), _received(profile)
    ties: dict[int, dict[str, float]] = {}
    for number, tie in enumerate(profile.ties):
        for layer in tie.layers:
            ties.setdefault(layer, {})[f"tie {number}"] = tie.size
    counted, found = counted_layers(profile), []
    for group in together(counted):
        parameters: dict[str, float] = {}
        for at in group:
            own = profile.layers[at].parameter_bytes - sum(ties.get(at, {}).values())
            parameters |= {f"{at}": own, **ties.get(at, {})}
        backward = sum(profile.layers[at].backward_seconds for at in group)
        row = UnitRow(
            forward=sum(profile.layers[at].forward_seconds for at in group),
            backward=backward,
            inputs=backward / 2,
            weights=backward / 2,
            again=sum(profile.layers[at].forward_seconds for at in group if counted[at]),
            sent=sent[group[-1]],
            kept=sum(kept[at] for at in group),
            recomputed=sum(min(kept[at], received[at]) if counted[at] and at else kept[at] for at in group),
        )
        found.append(
            Unit(
                name=next((profile.layers[at].name for at in group if counted[at]), profile.layers[group[0]].name),
                rows={samples: row},
                parameters={name: (round(size / element),) for name, size in parameters.items()},
            )
        )
    return found


def kept_bytes(profile: Profile) -> list[float]:
    """What the forward of every layer keeps: `kept_bytes` where all layers have them, else the outputs."""
    known = has_kept_bytes(profile)
    return [layer.kept_bytes or 0.0 if known else layer.activation_bytes for layer in profile.layers]


def has_kept_bytes(profile: Profile) -> bool:
    """Whether it is known what layers keep, on which the gain of recomputation depends."""
    return all(layer.kept_bytes is not None for layer in profile.layers)


def _sent(profile: Profile) -> list[float]:
    """Bytes that cross a cut behind each layer: outputs that later layers read, each once."""
    outputs = [layer.activation_bytes for layer in profile.layers]
    if profile.edges is None:
        return outputs
    last = list(range(len(outputs)))  # reader of each output
    for source, target in profile.edges:
        last[source] = max(last[source], target)
    crossing = [sum(outputs[at] for at in range(cut + 1) if last[at] > cut) for cut in range(len(outputs) - 1)]
    return [*crossing, outputs[-1]]


def _received(profile: Profile) -> Sequence[float]:
    """Bytes that each layer reads of others' outputs."""
    outputs = [layer.activation_bytes for layer in profile.layers]
    if profile.edges is None:
        return [0.0, *outputs[:-1]]
    found = [0.0] * len(outputs)
    for source, target in profile.edges:
        found[target] += outputs[source]
    return found
