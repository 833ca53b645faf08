"""`Software`: the kernels that a library runs and what it overlaps, for times and memory. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """A library.

    Attributes:
        name: shown in output.
        fused_attention: whether scores of attention stay in one kernel. If not, products, softmax and dropout write
            and read them.
        dropout: probability behind embedding, softmax, attention and MLP, where the model has none of its own.
        fused_gradients: whether the product of a weight's gradient adds to the sum of earlier micro-batches itself.
        hides_collectives: whether collectives of column-parallel layers overlap with their weight gradients.
        recomputes_all: whether a recomputed block runs to its end, not only to the last tensor that is needed.
        scatters: whether tensor-parallel processes with the same tokens each send a part of them to the next stage.
        waits: whether a rank computes nothing while it exchanges messages with another stage.
        message_seconds: that a message keeps both ranks busy together, beside its bytes.
        synchronous: whether the host waits for each kernel, and needs `Device.host_seconds` to see its end and again
            to launch the next one.
    """

    name: str
    fused_attention: bool
    dropout: float
    fused_gradients: bool
    hides_collectives: bool
    recomputes_all: bool
    scatters: bool
    waits: bool
    message_seconds: float = 0.0
    synchronous: bool = False


_EXCHANGE = 2.5e-4  # arXiv:2401.10241, table 6: messages of 10 to 28 MB take this and their bytes at 80 GB/s

PIPELOOM = Software(
    name="pipeloom",
    fused_attention=True,
    dropout=0.0,
    fused_gradients=False,
    hides_collectives=False,
    recomputes_all=False,
    scatters=False,
    waits=False,
)
_MEGATRON_2021 = Software(  # arXiv:2104.04473
    name="megatron-2021",
    fused_attention=False,
    dropout=0.1,
    fused_gradients=False,
    hides_collectives=False,
    recomputes_all=True,
    scatters=True,
    waits=True,
    message_seconds=_EXCHANGE,
)
# github.com/bigscience-workshop/bigscience, train/tr11-200B-ml: with CUDA_LAUNCH_BLOCKING=1
_MEGATRON_BLOCKING = replace(_MEGATRON_2021, name="megatron-blocking", synchronous=True)
# arXiv:2205.05198
_MEGATRON_2022 = replace(_MEGATRON_2021, name="megatron-2022", fused_gradients=True, hides_collectives=True)

SOFTWARE: Mapping[str, Software] = {
    each.name: each for each in (PIPELOOM, _MEGATRON_2021, _MEGATRON_BLOCKING, _MEGATRON_2022)
}
