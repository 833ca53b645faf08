"""`InsideStage`: how the processes of a stage share its layers and sequences, and what they send. No torch here."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from pipeloom.common.division import divisors
from pipeloom.errors import InputError, either
from pipeloom.ir.recompute import Recompute
from pipeloom.parallel.context.traffic import attention_traffic
from pipeloom.parallel.expert.traffic import Exchange, Rows, balanced_rows, dispatch_traffic
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
        expert: expert-parallel degree: processes that share the experts of a stage. They are replicas, or share
            sequences, so they are not more processes.
        expert_axes: mesh axes whose processes share experts.
        exchange: how tokens reach their experts.
    """

    tensor: int = 1
    layout: Literal["1d", "2d", "2.5d", "3d"] = "1d"
    depth: int | None = None
    sequence: bool = False
    context: int = 1
    context_kind: Literal["ring", "ring-plain", "ring-self-attention", "ulysses"] = "ring"
    expert: int = 1
    expert_axes: tuple[str, ...] = ("dp",)
    exchange: Exchange = "counts"

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
        found = {"tp": self.tensor, "cp": self.context, "ep": self.expert}
        if self.grid is not None:
            found |= self.grid.axes
            for names in (self.grid.outer.batch, self.grid.inner.batch, ("tp_row", "tp_column")):
                if all(name in found for name in names):
                    found["+".join(names)] = math.prod(found[name] for name in names)
        return found

    def check(self, sizes: LayerSizes) -> None:
        """Validate that layers, samples and sequences can be shared.

        Raises:
            InputError: a degree below 1, options that exclude each other, or a size that is not divided.
        """
        for name, degree in (("tensor", self.tensor), ("context", self.context), ("expert", self.expert)):
            if degree < 1:
                raise InputError(f"{name}={degree}: must be at least 1.")
        self._check_experts(sizes)
        if self.layout == "1d" and self.depth is not None:
            raise InputError(f"depth={self.depth} has no effect with layout 1d. Remove it, or use layout 2.5d.")
        if self.sequence and self.layout != "1d":
            raise InputError(f"sequence parallelism works with layout 1d alone, not {self.layout}. Remove it.")
        grid, cut, n = self.grid, self.head_parts, self.context
        why = f"tensor={self.tensor} with layout {self.layout}"
        divided = [("heads", sizes.heads, cut, why), ("mlp_width", sizes.mlp_width, cut, why)]
        if grid is not None:
            divided += [("width", sizes.width, grid.input_blocks, why), ("key heads", sizes.key_heads, cut, why)]
            divided += [("mlp_width", sizes.mlp_width, grid.input_blocks, why)]
            divided += [("micro-batch size", sizes.samples, grid.batch_blocks, why)]
        chunks = (2 if self.context_kind == "ring" and n > 1 else 1) * n
        shared = n * self.tensor if self.sequence else 1
        divided.append(("sequence length", sizes.sequence_length, math.lcm(chunks, shared), f"context={n}, {why}"))
        if self.context_kind == "ulysses" and n > 1:
            divided.append(("heads per process", sizes.heads // cut, n, f"context={n} of kind ulysses"))
        for name, size, by, reason in divided:
            if size % by:
                near = size // by * by
                fits = f"{near} or {near + by}" if near else str(by)
                raise InputError(
                    f"{name}={size}: must be a multiple of {by} for {reason}. Use {fits}, or other degrees."
                )
        if sizes.key_heads % cut and cut % sizes.key_heads:
            raise InputError(f"tensor={cut}: must divide the {sizes.key_heads} key heads, or be a multiple of them.")
        keys = max(1, sizes.key_heads // cut)
        if self.context_kind == "ulysses" and keys % n and n % keys:
            raise InputError(
                f"context={n} of kind ulysses: must divide the {keys} key heads of a process, or be a multiple of "
                "them. Use another degree, or ring."
            )

    def _check_experts(self, sizes: LayerSizes) -> None:
        experts = sizes.experts
        if experts is None:
            if self.expert > 1:
                raise InputError(f"expert={self.expert}: the model has no experts. Remove it, or add experts.")
            return
        if self.layout != "1d":
            raise InputError(f"layout={self.layout}: experts work with layout 1d alone. Use 1d.")
        if experts.experts % self.expert:
            raise InputError(
                f"expert={self.expert}: must divide the {experts.experts} experts. Use "
                f"{either(divisors(experts.experts))}."
            )
        if experts.expert_width % self.tensor:
            raise InputError(
                f"expert_width={experts.expert_width}: must be a multiple of {self.tensor} for tensor={self.tensor}. "
                "Use other degrees."
            )

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

    def block(
        self, recompute: Recompute = Recompute.NONE, *, experts: bool = False, rows: Rows | None = None
    ) -> Traffic:
        """One block; a backward includes what it recomputes.

        Args:
            recompute: activation recomputation.
            experts: whether the block has experts in place of an MLP.
            rows: assignments that pass the experts; None: balanced experts.
        """
        attention, again = self.attention()
        repeated = again if recompute is Recompute.SELECTIVE else {}
        full = recompute is Recompute.FULL
        if not experts:
            return self._layers.block(attention, repeated, full=full)
        sizes, inside = self._sizes, self._inside
        assert isinstance(self._layers, OneDTraffic)
        assert sizes.experts is not None
        rows = rows or balanced_rows(sizes.experts, sizes.tokens, inside.expert, samples=sizes.samples)
        return self._layers.expert_block(
            attention,
            repeated,
            self.dispatch(rows),
            full=full,
            assignments=rows.own,
            shared=sizes.experts.shared > 0,
        )

    def dispatch(self, rows: Rows | None = None) -> Traffic:
        """What a layer of experts sends along ep; `rows` as in `block`."""
        sizes, inside = self._sizes, self._inside
        assert sizes.experts is not None
        return dispatch_traffic(
            sizes.experts,
            inside.expert,
            samples=sizes.samples,
            tokens=sizes.tokens,
            width=sizes.width,
            element=sizes.element,
            exchange=inside.exchange,
            rows=rows,
        )

    def norm(self) -> Traffic:
        """The norm behind the blocks."""
        return self._layers.norm()

    def head(self) -> Traffic:
        """The last layer, and the loss."""
        return self._layers.head()

    def attention(self) -> tuple[Traffic, Table]:
        """Attention of a block, and what its recomputation sends."""
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
