"""`InsideStage`: how the processes of a stage share its layers and sequences, and what they send. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from pipeloom.ir.recompute import Recompute
from pipeloom.parallel.context.traffic import attention_traffic
from pipeloom.parallel.placed import Place
from pipeloom.parallel.tensor.grids.shape import GridShape
from pipeloom.parallel.tensor.grids.traffic import GridTraffic
from pipeloom.parallel.tensor.one_d.traffic import OneDTraffic
from pipeloom.parallel.traffic import LayerSizes, Table, Traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class InsideStage:
    """The processes of one stage of one replica; options as of `pipeloom.parallelize` and `pipeloom.Pipeline`.

    Attributes:
        tensor: tensor-parallel degree.
        layout: how layers are shared.
        depth: of layout 2.5d.
        sequence: Megatron's sequence parallelism, with layout 1d.
        context: context-parallel degree.
        context_kind: how attention communicates.
    """

    tensor: int = 1
    layout: Literal["1d", "2d", "2.5d", "3d"] = "1d"
    depth: int | None = None
    sequence: bool = False
    context: int = 1
    context_kind: Literal["ring", "ring-plain", "ring-self-attention", "ulysses"] = "ring"

    @property
    def processes(self) -> int:
        return self.tensor * self.context

    @property
    def grid(self) -> GridShape | None:
        """The grid of processes; None with layout 1d. Raises InputError where there is none of this many."""
        return None if self.layout == "1d" else GridShape.of(self.tensor, self.layout, self.depth)

    @property
    def head_parts(self) -> int:
        """Among how many processes heads, and features inside blocks, are divided."""
        return self.tensor if self.grid is None else self.grid.side

    @property
    def sample_parts(self) -> int:
        """Among how many processes samples are divided."""
        return 1 if self.grid is None else self.grid.batch_blocks

    def key_heads(self, key_heads: int) -> int:
        """Key heads of a process; several processes may share one."""
        return max(1, key_heads // self.head_parts)

    @property
    def axes(self) -> Mapping[str, int]:
        """Degrees of the axes, by name; of grids, and of axes together too."""
        found = {"tp": self.tensor, "cp": self.context}
        if self.grid is not None:
            found |= self.grid.axes
            for names in (self.grid.outer.batch, self.grid.inner.batch, ("tp_row", "tp_column")):
                if all(name in found for name in names):
                    degree = 1
                    for name in names:
                        degree *= found[name]
                    found["+".join(names)] = degree
        return found

    def traffic(self, sizes: LayerSizes, place: Place | None = None) -> "StageTraffic":
        """What the layers of a stage send for one micro-batch of `sizes`."""
        return StageTraffic(self, sizes, place)


class StageTraffic:
    """Traffic of the layers of a stage; methods return what one layer sends for one micro-batch.

    Args:
        inside: the processes.
        sizes: of the layers, and of a micro-batch.
        place: of the process; None: one that sends most.
    """

    def __init__(self, inside: InsideStage, sizes: LayerSizes, place: Place | None = None) -> None:
        self._inside = inside
        self._sizes = sizes = replace(sizes, sequence_length=sizes.sequence_length // inside.context)
        grid = inside.grid
        self._layers: OneDTraffic | GridTraffic
        if grid is None:
            self._layers = OneDTraffic(sizes, inside.tensor, sequence=inside.sequence)
        else:
            self._layers = GridTraffic(sizes, grid, place)

    def embedding(self) -> Traffic:
        return self._layers.embedding()

    def block(self, recompute: Recompute = Recompute.NONE) -> Traffic:
        """One block; a backward includes what it recomputes."""
        attention, again = self._attention()
        kept = recompute is not Recompute.SELECTIVE
        return self._layers.block(attention, {} if kept else again, full=recompute is Recompute.FULL)

    def norm(self) -> Traffic:
        """The norm behind the blocks."""
        return self._layers.norm()

    def head(self) -> Traffic:
        """The last layer, and the loss."""
        return self._layers.head()

    def _attention(self) -> tuple[Traffic, Table]:
        sizes, inside = self._sizes, self._inside
        return attention_traffic(
            inside.context_kind,
            inside.context,
            tokens=sizes.tokens // inside.sample_parts,
            heads=sizes.heads // inside.head_parts,
            key_heads=inside.key_heads(sizes.key_heads),
            head_width=sizes.head_width,
            element=sizes.element,
        )
