"""The rank order of a run, for `pipeloom doctor`: which processes communicate along each mesh axis, and where."""

from dataclasses import dataclass

from pipeloom.train.config.train_config import TrainConfig

_SENDS = {
    "tp": "activations of each layer",
    "cp": "keys and values of each layer",
    "ep": "tokens to experts and back in each layer of experts",
    "pp": "activations between stages",
    "dp": "gradients and parameters once per step",
}
_OPTIONS = {"tp": "tensor", "cp": "context", "ep": "expert"}  # of axes that communicate in layers


@dataclass(frozen=True, slots=True)
class AxisRow:
    """One mesh axis.

    Attributes:
        axis: its name.
        degree: processes along it.
        distance: between the ranks of neighbours.
        ranks: of the processes along it through process 0.
        crosses_nodes: whether processes along it are on several nodes.
        sends: what is sent along it.
    """

    axis: str
    degree: int
    distance: int
    ranks: tuple[int, ...]
    crosses_nodes: bool
    sends: str


def rank_order(config: TrainConfig, processes_per_node: int | None) -> list[AxisRow]:
    """The axes of a run with several processes, innermost first; then expert parallelism, which divides one of them.

    Args:
        config: of the run.
        processes_per_node: adjacent ranks that run on one machine; None: all.

    Raises:
        InputError: degrees or an order that do not fit.
    """
    shape = config.mesh_shape()
    node = processes_per_node or shape.num_processes
    rows = []
    for axis in (*reversed(shape.axes), "ep"):
        if shape.degree(axis) > 1:
            ranks = shape.along(axis, 0)
            crosses = shape.crosses_nodes(axis, node)
            rows.append(AxisRow(axis, shape.degree(axis), ranks[1] - ranks[0], ranks, crosses, _SENDS[axis]))
    return rows


def order_lines(rows: list[AxisRow]) -> list[str]:
    """The rows as lines of a terminal, with a warning where layers communicate between nodes."""
    lines = []
    for row in rows:
        shown = " ".join(map(str, row.ranks[:4])) + (" .." if row.degree > 4 else "")
        where = "between nodes" if row.crosses_nodes else "within a node"
        lines.append(f"{row.axis}  {row.degree:>4} processes, such as ranks {shown}: {row.sends}, {where}")
    for index, row in enumerate(rows):
        if row.axis in _OPTIONS and row.crosses_nodes:
            fix = f"Lower --parallel.{_OPTIONS[row.axis]}"
            if index and row.axis != "ep":  # else it is innermost already
                fix += f", or put {row.axis} last in --parallel.order"
            lines.append(
                f"warning: {row.axis} communicates in each layer, and links between nodes are slower than those within "
                f"one. {fix}."
            )
    return lines
