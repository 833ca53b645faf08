"""What n context-parallel processes send along cp in attention, for one micro-batch and layer. No torch here.

    kind                   forward                       backward
    ring, ring-plain       (n-1) (k + v)                 (n-1) (k + v + dk + dv)
    ring-self-attention    (n-1) (k + v)                 (n-1) (k + v + dk + dv)
    ulysses                (n-1)/n (q + k + v + out)     the same

of the bytes of this process's tokens; dk and dv have at least 4 bytes per element. Ulysses sends key heads that are
fewer than n to all processes whose query heads share them. Layers without attention send nothing; gradients of
parameters are summed once per step, with those of data parallelism.
"""

from typing import Literal

from pipeloom.parallel.traffic import Table, Traffic, sends, total

_CP = "cp"


def attention_traffic(
    kind: Literal["ring", "ring-plain", "ring-self-attention", "ulysses"],
    degree: int,
    *,
    tokens: int,
    heads: int,
    key_heads: int,
    head_width: int,
    element: int,
) -> tuple[Traffic, Table]:
    """The traffic of one call of attention, and what its recomputation sends.

    Args:
        degree: number of context-parallel processes.
        tokens: of this process.
        heads, key_heads: of this process.
        element: bytes per element.
    """
    if kind == "ulysses":
        return _ulysses(degree, tokens * head_width * element, heads, key_heads)
    keys = tokens * key_heads * head_width  # elements of k, and of v
    wide, peers = max(4, element), degree - 1
    if kind == "ring-self-attention":
        forward = sends(_CP, "shift", degree, keys * element, 2 * peers)
        sums = sends(_CP, "reduce_scatter", degree, keys * wide * degree, 2)
        return Traffic(forward, total([forward, sums])), forward
    forward = sends(_CP, "shift", degree, 2 * keys * element, peers)
    gradients = sends(_CP, "shift", degree, 2 * keys * wide, peers)
    return Traffic(forward, total([forward, gradients])), forward


def _ulysses(degree: int, head_bytes: int, heads: int, key_heads: int) -> tuple[Traffic, Table]:
    sent = key_heads if key_heads % degree == 0 else degree
    there = sends(_CP, "all_to_all", degree, (heads + 2 * sent) * head_bytes)
    back = sends(_CP, "all_to_all", degree, heads * head_bytes)
    both = total([there, back])
    return Traffic(both, both), there  # the recomputation stops before the output is sent
