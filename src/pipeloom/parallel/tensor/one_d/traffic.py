"""What t processes of layout "1d" send along tp for one micro-batch. No torch here.

    T tokens of width W, e bytes per element; all-reduces of n bytes send 2 (t-1)/t n per process, others (t-1)/t n

    layer          without sequence              with sequence
                   forward       backward        forward           backward
    embedding      all-reduce    -               reduce-scatter    all-gather
    column         -             all-reduce      all-gather        all-gather (again) and reduce-scatter
    row            all-reduce    -               reduce-scatter    all-gather
    head           -             all-reduce      all-gather        all-gather (again) and reduce-scatter
    loss           all-reduce of T and of 2 T numbers of at least 4 bytes
    experts        as column (gathered tokens are kept) and row; all-reduce of the gates' gradients in backward

each of n = e T W bytes. Layers that read the same input, such as the two of a gated MLP, enter it once. In a block that
is recomputed as a whole, gathered tokens are kept from its recomputation to its backward, which does not gather again.
The recomputation stops where everything needed is there: the last row layer's output is not summed again.

Sums of gradients over `Placed.sum_over`, once per step, are not counted here.
"""

from pipeloom.parallel.traffic import LayerSizes, Table, Traffic, sends, together, total

_TP = "tp"


class OneDTraffic:
    """Traffic of the layers of a stage.

    Args:
        sizes: of the layers. The sequence length is that of this process's part, if a sequence is shared along cp.
        degree: number of tensor-parallel processes.
        sequence: whether processes share the tokens between cut layers.
    """

    def __init__(self, sizes: LayerSizes, degree: int, *, sequence: bool) -> None:
        self.sizes, self.degree, self.sequence = sizes, degree, sequence
        self._bytes = sizes.tokens * sizes.width * sizes.element

    def _send(self, collective: str) -> Table:
        """What a collective sends of all tokens, which an all-gather puts together from one part per process."""
        part = self._bytes // self.degree if collective == "all_gather" else self._bytes
        return sends(_TP, collective, self.degree, part)

    def embedding(self) -> Traffic:
        return self.row()

    def column(self, *, again: bool = True) -> Traffic:
        """One or several column layers of the same input; `again`: gathered tokens were not kept."""
        if not self.sequence:
            return Traffic({}, self._send("all_reduce"))
        gather = self._send("all_gather")
        return Traffic(gather, total([*([gather] if again else []), self._send("reduce_scatter")]))

    def row(self) -> Traffic:
        if not self.sequence:
            return Traffic(self._send("all_reduce"), {})
        return Traffic(self._send("reduce_scatter"), self._send("all_gather"))

    def block(self, attention: Traffic, repeated: Table, *, full: bool) -> Traffic:
        """A block.

        Args:
            attention: of attention between processes that share sequences.
            repeated: what a recomputation of attention sends; empty if it is not recomputed.
            full: whether the block is recomputed as a whole.
        """
        column, row = self.column(again=not full), self.row()
        forward = total([column.forward, attention.forward, row.forward, column.forward, row.forward])
        backward = [row.backward, column.backward, attention.backward, row.backward, column.backward]
        if full:
            repeated = total([column.forward, attention.forward, row.forward, column.forward])
        return Traffic(forward, total([*backward, repeated]))

    def expert_block(
        self, attention: Traffic, repeated: Table, dispatch: Traffic, *, full: bool, assignments: int, shared: bool
    ) -> Traffic:
        """A block with experts in place of an MLP.

        Args:
            attention, repeated, full: as for `block`.
            dispatch: what the experts send along ep.
            assignments: of tokens of this process to experts, whose gates have a gradient on every process.
            shared: whether there are shared experts.
        """
        column, row, kept = self.column(again=not full), self.row(), self.column(again=False)
        gates = sends(_TP, "all_reduce", self.degree, assignments * self.sizes.wide)
        others = together([column, row]) if shared else Traffic({}, {})
        again = repeated
        if full:  # up to the last layer whose input is needed; its output is not
            again = total([column.forward, attention.forward, row.forward, kept.forward, dispatch.forward])
            again = total([again, row.forward, column.forward]) if shared else again
        forward = [column.forward, attention.forward, row.forward, kept.forward, dispatch.forward, row.forward]
        backward = [column.backward, attention.backward, row.backward, kept.backward, gates, dispatch.backward]
        return Traffic(total([*forward, others.forward]), total([*backward, row.backward, others.backward, again]))

    def norm(self) -> Traffic:
        return Traffic({}, {})

    def head(self) -> Traffic:
        """The last layer, and the loss."""
        numbers = self.sizes.tokens * self.sizes.wide
        losses = (sends(_TP, "all_reduce", self.degree, count * numbers) for count in (1, 2))
        last = self.column()
        return Traffic(total([last.forward, *losses]), last.backward)
