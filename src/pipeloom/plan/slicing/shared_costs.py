"""Costs of slices on one of the processes that share each stage, from those of one process."""

from dataclasses import replace

from pipeloom.plan.shared_layers import SharedLayers
from pipeloom.plan.slicing.slice_costs import LinearTime, SliceCosts


def share_costs(costs: SliceCosts, layers: SharedLayers, *, blocks: int) -> SliceCosts:
    """Computation divided as that of blocks, and the collectives of each slice added. Tensor parallelism, layout 1d.

    Between measured lengths collectives are interpolated as times are; below the first they are those of the first.

    Args:
        costs: of one rank's share, computed by one process.
        layers: the sizes, and the processes.
        blocks: of a rank.
    """
    part = layers.block(1.0).part

    def shared(time: LinearTime, direction: int) -> LinearTime:
        def of(tokens: float, seconds: float) -> float:
            slices = replace(layers, model=replace(layers.model, sequence_length=max(1, round(tokens))), samples=1)
            return seconds * part + blocks * slices.collectives()[direction]

        base = tuple((tokens, of(tokens, seconds)) for tokens, seconds in time.base)
        a0, a1, a2, a3 = (each * part for each in time.context)
        return LinearTime(base=base, context=(a0, a1, a2, a3))

    return replace(
        costs,
        forward=shared(costs.forward, 0),
        backward=shared(costs.backward, 1),
        seconds_per_token_sent=costs.seconds_per_token_sent * layers.message_part,
    )
