"""Seconds of layers where a machine has measured layers of the model (`pipeloom.plan.local`). No torch here."""

from collections.abc import Iterable
from dataclasses import replace

from pipeloom.ir.recompute import Recompute
from pipeloom.parallel.inside_stage import InsideStage
from pipeloom.plan.costs.measured_links import without_collectives
from pipeloom.plan.local.layer_times import LayerTimes, Three
from pipeloom.plan.stage_times import Seconds, StageTimes


def scaled_layers(
    found: LayerTimes, times: StageTimes, kinds: Iterable[bool], microbatches: int
) -> tuple[Seconds, Seconds, dict[bool, Seconds], Seconds]:
    """Embedding, head, blocks without and with experts, and a stage beside its layers.

    Predicted computations are scaled by what the measured layers take over their predictions; collectives are not.
    Measured are whole layers on whole sequences, without recomputation; a recomputed forward is scaled as a forward.

    Args:
        found: the measured layers.
        times: predicts them, and those that are wanted.
        kinds: of blocks: False without experts, True with them.
        microbatches: per step.
    """
    samples, row = found.nearest(times.samples, microbatches)
    same = replace(times, samples=samples, inside=InsideStage(), slices=1, imbalance=1.0, recompute=Recompute.NONE)
    wanted = replace(times, recompute=Recompute.NONE)
    alone = replace(wanted, cluster=without_collectives(times.cluster))
    blocks = {}
    for experts in kinds:
        own, reference, plain = row.blocks[experts], same.block(experts=experts), wanted.block(experts=experts)
        again = times.block(experts=experts).backward_input - plain.backward_input
        whole = _scaled(plain, alone.block(experts=experts), own, reference)
        again *= own[0] / reference.forward
        blocks[experts] = whole._replace(backward_input=whole.backward_input + again)
    return (
        _scaled(wanted.embedding(), alone.embedding(), row.embedding, same.embedding()),
        _scaled(wanted.head(), alone.head(), row.head, same.head()),
        blocks,
        Seconds(*row.stage),
    )


def _scaled(predicted: Seconds, alone: Seconds, own: Three, reference: Seconds) -> Seconds:
    """`predicted`, of which `alone` are computations."""
    return Seconds(
        *(
            whole - computed + (computed * found / of if of else found)
            for whole, computed, found, of in zip(predicted, alone, own, reference, strict=True)
        )
    )
