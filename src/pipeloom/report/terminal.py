"""Prints a timeline in the terminal, in colour with rich, or with letters if the terminal has no colours.

rank 0  F0 F1 F2 F3          B0--- F4 B1--- ...
rank 1     F0 F1 F2    B0--- F3 B1--- F4 ...
  data  U1--              R1--                    the link between data-parallel replicas, with the stage
"""

import statistics
from collections.abc import Callable, Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeloom.common.quantities import number_text, seconds_text
from pipeloom.ir.action import Op
from pipeloom.report.drawing import COLOURS, OP_NAMES, label, op_shares, ops_in
from pipeloom.sim.background import LINKS
from pipeloom.sim.timeline import Span, Timeline

Cell = tuple[str, Op | None]  # text, and the op whose colour it has
_LETTERS = {Op.UNSHARD: "U", Op.REDUCE_GRAD: "R", Op.OFFLOAD: "O", Op.RELOAD: "L"}  # ops on the links of a rank

_PLAIN_COLUMNS = 160
_MOST_RANKS = 32


def print_timeline(timeline: Timeline, console: Console | None = None) -> None:
    """Print the timeline, one row per rank, and a table of its per-rank numbers."""
    console = console or Console(highlight=False)
    _print_picture(timeline, console, ())
    _print_table(timeline, console)


def print_comparison(timelines: Sequence[Timeline], console: Console | None = None) -> None:
    """Print timelines one below the other at the same scale, and a table of their numbers, shortest first."""
    console = console or Console(highlight=False)
    for timeline in timelines:
        console.print(f"{timeline.name}", markup=False)
        _print_picture(timeline, console, timelines, legend=timeline is timelines[-1])
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    streams = any(timeline.is_stream for timeline in timelines)
    more = ("period", "weight versions") if streams else ("longest rank", "bubble")
    for heading in ("schedule", "makespan", "bubble", *more, "peak live activations"):
        left = heading == "schedule"  # wrap headings rather than names
        table.add_column(heading, justify="left" if left else "right", no_wrap=left)
    for timeline in sorted(timelines, key=lambda each: each.makespan):
        longest = seconds_text(timeline.span_seconds), _percent(timeline.bubble_fraction_span)
        table.add_row(
            timeline.name,
            seconds_text(timeline.makespan),
            _percent(timeline.bubble_fraction),
            *((_period(timeline), str(max(timeline.weight_versions))) if streams else longest),
            number_text(max(timeline.peak_activations)),
        )
    console.print(table)


def _print_picture(timeline: Timeline, console: Console, others: Sequence[Timeline], *, legend: bool = True) -> None:
    coloured = console.is_terminal and console.color_system is not None and not console.no_color
    margin = max(len(f"rank {timeline.num_ranks - 1}  "), *(len(f"  {link}  ") for link in ("", *timeline.links)))
    columns = max(8, (console.width if console.is_terminal else _PLAIN_COLUMNS) - margin)
    rows, numbered = layout(timeline, columns, letters=not coloured, others=others)
    links = {link: link_layout(timeline, link, columns, letters=not coloured, others=others) for link in timeline.links}
    for rank in shown_ranks(timeline.num_ranks):
        if rank is None:
            console.print(f"{'...':<{margin}}{timeline.num_ranks - _MOST_RANKS} more ranks", markup=False)
            continue
        lanes = [(f"  {link}", cells[rank]) for link, cells in links.items()]
        for name, cells in ((f"rank {rank}", rows[rank]), *lanes):
            line = Text(f"{name:<{margin}}")
            for text, op in cells:
                line.append(text, style=f"black on {COLOURS[op]}" if coloured and op is not None else None)
            if not coloured:
                line.rstrip()
            console.print(line, soft_wrap=True)
    if not legend:
        return
    line = Text()
    for op in ops_in((timeline, *others)):
        line.append(f" {_LETTERS.get(op, op.value[0])} ", style=f"black on {COLOURS[op]}" if coloured else None)
        line.append(f" {OP_NAMES[op]}  ")
    dense = "too many actions for numbers: each character is the op that fills most of its time, '.' is idle"
    line.append("numbers are micro-batches" if numbered else dense)
    console.print(line, soft_wrap=True)


def shown_ranks(num_ranks: int) -> list[int | None]:
    """The ranks to print; of very many the first and the last, None standing for those between."""
    if num_ranks <= _MOST_RANKS:
        return list(range(num_ranks))
    half = _MOST_RANKS // 2
    return [*range(half), None, *range(num_ranks - half, num_ranks)]


def layout(
    timeline: Timeline, columns: int, *, letters: bool, others: Sequence[Timeline] = ()
) -> tuple[list[list[Cell]], bool]:
    """Lay out the rows of a timeline.

    If an action is narrower than one character, each character shows the op that fills most of its time.

    Args:
        timeline: the timeline.
        columns: maximum length of a row in characters.
        letters: whether an action is written ``F3`` rather than ``3`` in the colour of its op.
        others: timelines that get the same scale if they are laid out with the same arguments.

    Returns:
        The cells per rank, and whether they show single actions.
    """
    scale, makespan, numbered = _fit((timeline, *others), columns, letters)
    if not scale:
        return [[] for _ in timeline.spans], True

    def text(span: Span, width: int) -> str:
        if letters:
            return f"{span.action.op.value[0]}{label(span)}"[: width - 1].ljust(width - 1, "-") + " "
        return label(span).ljust(width) if len(label(span)) <= width else " " * width

    if numbered:
        rows = timeline.spans if timeline.is_stream else timeline.compute_spans
        return [_cells((span for span in row if span.action.op in COLOURS), scale, text) for row in rows], True
    return [_dominant(row, makespan, round(scale * makespan)) for row in timeline.spans], False


def link_layout(
    timeline: Timeline, link: str, columns: int, *, letters: bool, others: Sequence[Timeline] = ()
) -> list[list[Cell]]:
    """The cells of one link per rank, at the scale of `layout` with the same arguments."""
    scale, _, _ = _fit((timeline, *others), columns, letters)

    def text(span: Span, width: int) -> str:
        return f"{_LETTERS[span.action.op]}{span.action.stage}"[:width].ljust(width, "-")

    rows = ((span for span in row if LINKS[span.action.op] == link) for row in timeline.background)
    return [_cells(row, scale, text) for row in rows]


def _fit(together: Sequence[Timeline], columns: int, letters: bool) -> tuple[float, float, bool]:
    """Characters per second, the longest makespan, and whether single actions are visible."""
    shortest = min(filter(None, map(_shortest, together)), default=0.0)
    makespan = max(each.makespan for each in together)
    if not shortest:
        return 0.0, makespan, True
    widest = max(len(label(span)) for each in together for row in each.compute_spans for span in row) + letters
    fitting = columns * shortest / makespan  # characters of the shortest op in a row of full length
    wanted = min(int(fitting), widest + 1)
    if wanted >= (widest + 1 if letters else 1):
        return wanted / shortest, makespan, True
    if fitting >= 1:  # an integer number of characters per action shows every action
        columns = round(makespan / shortest) * int(fitting)
    return columns / makespan, makespan, False


def _shortest(timeline: Timeline) -> float:
    """Seconds of the shortest op; the median of its spans, which ignores outliers of a measurement."""
    by_op: dict[Op, list[float]] = {}
    for row in timeline.compute_spans:
        for action, start, end in row:
            by_op.setdefault(action.op, []).append(end - start)
    return min((m for seconds in by_op.values() if (m := statistics.median(seconds)) > 0), default=0.0)


def _cells(row: Iterable[Span], scale: float, text: Callable[[Span, int], str]) -> list[Cell]:
    """The spans that are at least one character wide, each with its `text` of a width, and the gaps between them."""
    cells: list[Cell] = []
    column = 0
    for span in row:
        # Round halves up: round() would round them to even, and equal spans would differ in width.
        first, last = max(column, int(span.start * scale + 0.501)), int(span.end * scale + 0.501)
        if last > first:
            cells += [(" " * (first - column), None), (text(span, last - first), span.action.op)]
            column = last
    return cells


def _dominant(row: Sequence[Span], seconds: float, columns: int) -> list[Cell]:
    cells: list[Cell] = []
    for shares in op_shares(row, seconds, columns):
        idle = 1 - sum(shares.values())
        op = max(shares, key=lambda op: shares[op]) if shares else None
        cells.append((".", None) if op is None or shares[op] < idle else (op.value[0], op))
    return cells


def _print_table(timeline: Timeline, console: Console) -> None:
    console.print(
        f"\n{timeline.name}, {timeline.kind}: {timeline.num_ranks} ranks, {timeline.num_microbatches} micro-batches"
        + (f", {timeline.num_chunks} virtual stages per rank" if timeline.num_chunks > 1 else "")
        + (f", {timeline.num_slices} slices" if timeline.num_slices > 1 else ""),
        markup=False,
        soft_wrap=True,
    )
    summary = Table(box=None, show_header=False, pad_edge=False, padding=(0, 3, 0, 0))
    bubble, bubble_span = (f"bubble {_percent(b)}" for b in (timeline.bubble_fraction, timeline.bubble_fraction_span))
    bubble += ", including warm-up and cool-down" if timeline.is_stream else ""
    summary.add_row("makespan", seconds_text(timeline.makespan), bubble)
    summary.add_row("longest rank", seconds_text(timeline.span_seconds), bubble_span)
    summary.add_row("without bubbles", seconds_text(timeline.ideal_seconds), "")
    if timeline.is_stream:
        ideal = f"per micro-batch, ideal {seconds_text(timeline.ideal_period_seconds)}"
        summary.add_row("steady-state period", _period(timeline), ideal)
    console.print(summary)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    headings = ["rank", "computes", "idle", "idle fraction", "peak live activations"]
    for heading in headings + ["weight versions"] * timeline.is_stream:
        table.add_column(heading, justify="right")
    for rank in shown_ranks(timeline.num_ranks):
        if rank is None:
            table.add_row("...")
            continue
        busy = timeline.busy_seconds[rank]
        idle = timeline.makespan - busy
        table.add_row(
            str(rank),
            seconds_text(busy),
            seconds_text(max(0.0, idle)),
            _percent(idle / timeline.makespan if timeline.makespan else 0.0),
            number_text(timeline.peak_activations[rank]),
            *([str(timeline.weight_versions[rank])] if timeline.is_stream else []),
        )
    console.print(table)


def _period(timeline: Timeline) -> str:
    seconds = timeline.period_seconds
    return "stream too short" if seconds is None else seconds_text(seconds)


def _percent(fraction: float) -> str:
    return f"{100 * max(0.0, fraction):.2f} %"
