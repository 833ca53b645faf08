"""What processes that share a stage send: calls and bytes by axis and collective, as `AxisMeter` counts them.

Each layout has its formulae next to its layers: `tensor.one_d.traffic`, `tensor.grids.traffic`, `context.traffic`.
`pipeloom.parallel.inside_stage` adds them up. No torch here.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from pipeloom.parallel.expert.sizes import ExpertSizes


class Sent(NamedTuple):
    """One kind of collective along one axis.

    Attributes:
        calls: number of calls.
        num_bytes: sent by one process; `pipeloom.parallel.axis` says what a call counts.
    """

    calls: int
    num_bytes: int


Table = Mapping[tuple[str, str], Sent]  # by axis, as `Mesh.axis` names it, and collective


class Traffic(NamedTuple):
    """The collectives of one layer or several on one micro-batch.

    Attributes:
        forward: in F.
        backward: in B or I; W has none.
    """

    forward: Table
    backward: Table

    def times(self, number: int) -> "Traffic":
        """The traffic of `number` equal layers or micro-batches."""
        return Traffic(*(total([part] * number) for part in self))

    def by_axis(self) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes by axis, forward and backward."""
        forward, backward = dict[str, int](), dict[str, int]()
        for table, found in zip(self, (forward, backward), strict=True):
            for (axis, _), sent in table.items():
                found[axis] = found.get(axis, 0) + sent.num_bytes
        return forward, backward


def total(tables: Iterable[Table]) -> dict[tuple[str, str], Sent]:
    """The sum of calls and bytes."""
    found: dict[tuple[str, str], Sent] = {}
    for table in tables:
        for key, sent in table.items():
            before = found.get(key)
            found[key] = sent if before is None else Sent(before[0] + sent[0], before[1] + sent[1])
    return found


def together(parts: Iterable[Traffic]) -> Traffic:
    """The sum over layers."""
    parts = list(parts)
    return Traffic(total(part.forward for part in parts), total(part.backward for part in parts))


def nothing() -> Traffic:
    """The traffic of a layer that does not communicate."""
    return Traffic({}, {})


def sends(axis: str, collective: str, degree: int, num_bytes: int, calls: int = 1) -> Table:
    """`calls` calls of a collective; with one member nothing is sent.

    Args:
        num_bytes: of the tensor that one process has, without `degree`: the input of all_reduce, all_gather,
            reduce_scatter and all_to_all, the payload of broadcast, reduce and shift.
    """
    if degree == 1 or calls == 0:
        return {}
    match collective:
        case "all_reduce":
            each = 2 * num_bytes * (degree - 1) // degree
        case "all_gather":
            each = num_bytes * (degree - 1)
        case "reduce_scatter" | "all_to_all":
            each = num_bytes * (degree - 1) // degree
        case _:
            each = num_bytes
    return {(axis, collective): Sent(calls, calls * each)}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSizes:
    """Sizes of a transformer's layers and of one micro-batch, which formulae of traffic need.

    Attributes:
        samples: per micro-batch, all processes of a stage together.
        sequence_length: tokens per sample, all processes of a stage together.
        width: of the residual stream.
        heads, key_heads: query heads, and key and value heads.
        head_width: of each of them.
        mlp_width: of the MLP.
        gated: whether the MLP has two matrices of width x mlp_width.
        centered: whether norms subtract the mean (layer norm), or not (RMS norm).
        vocabulary_size: number of token ids.
        element: bytes per element of activations. Sums of norms and losses have at least 4.
        experts: of blocks that have experts in place of an MLP; None: there are no such blocks.
    """

    samples: int
    sequence_length: int
    width: int
    heads: int
    key_heads: int
    head_width: int
    mlp_width: int
    gated: bool = False
    centered: bool = True
    vocabulary_size: int
    element: int
    experts: ExpertSizes | None = None

    @property
    def tokens(self) -> int:
        return self.samples * self.sequence_length

    @property
    def qkv_features(self) -> int:
        """Rows of the queries, keys and values together."""
        return (self.heads + 2 * self.key_heads) * self.head_width

    @property
    def wide(self) -> int:
        """Bytes per element of sums."""
        return max(4, self.element)
