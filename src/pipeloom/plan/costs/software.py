"""`Software`: what kernels a library runs and what it overlaps, as far as times and memory depend on it. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """A library.

    Attributes:
        name: shown in output.
        fused_attention: whether scores of attention stay in one kernel. If not, products, softmax and dropout write
            and read them.
        dropout: probability behind embedding, softmax, attention and MLP, where the model has none of its own.
        fused_gradients: whether the product of a weight's gradient adds to the sum of earlier micro-batches itself.
        hides_collectives: whether collectives of column-parallel layers pass while their weight gradients are computed.
        recomputes_all: whether a recomputed block runs to its end, and not only to the last tensor that is needed.
        scatters: whether tensor-parallel processes that have the same tokens send a part of them each to the next stage.
        waits: whether a rank computes nothing while its messages to other stages travel.
    """

    name: str
    fused_attention: bool
    dropout: float
    fused_gradients: bool
    hides_collectives: bool
    recomputes_all: bool
    scatters: bool
    waits: bool


SOFTWARE: Mapping[str, Software] = {
    each.name: each
    for each in (
        Software(
            name="pipeloom",
            fused_attention=True,
            dropout=0.0,
            fused_gradients=False,
            hides_collectives=False,
            recomputes_all=False,
            scatters=False,
            waits=False,
        ),
        Software(  # arXiv:2104.04473
            name="megatron-2021",
            fused_attention=False,
            dropout=0.1,
            fused_gradients=False,
            hides_collectives=False,
            recomputes_all=True,
            scatters=True,
            waits=True,
        ),
        Software(  # arXiv:2205.05198
            name="megatron-2022",
            fused_attention=False,
            dropout=0.1,
            fused_gradients=True,
            hides_collectives=True,
            recomputes_all=True,
            scatters=True,
            waits=True,
        ),
        Software(  # arXiv:2407.21783
            name="megatron-flash",
            fused_attention=True,
            dropout=0.0,
            fused_gradients=True,
            hides_collectives=True,
            recomputes_all=True,
            scatters=True,
            waits=False,
        ),
    )
}
PIPELOOM = SOFTWARE["pipeloom"]
