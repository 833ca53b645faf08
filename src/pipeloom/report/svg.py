"""Draws timelines as one SVG picture at the same scale, with micro-batches, seconds and live activations."""

from collections.abc import Sequence
from html import escape

from pipeloom.common.quantities import bytes_text, number_text, percent_text, seconds_text
from pipeloom.ir.action import COMPUTE_OPS, RECEIVES, Op
from pipeloom.report.drawing import COLOURS, OP_NAMES, busy_shares, described, label, op_shares, ops_in, ticks
from pipeloom.sim import Span, Timeline, critical_path
from pipeloom.sim.background import LINKS

_WIDTH, _LEFT, _RIGHT, _BAR, _LINK, _MEMORY, _GAP = 1040.0, 58.0, 46.0, 22.0, 6.0, 13.0, 9.0
_STRIP = 4.0  # height of a collective inside an action
_TICK = 1.6  # width of an optimizer step of zero duration
_MOST_TOOLTIPS = 2000  # a tooltip multiplies the bytes of a span
_STYLE = """
.pl{font:11px ui-sans-serif,system-ui,sans-serif;color:var(--ink,#1d2330)}
.pl text{fill:currentColor}.pl .soft{opacity:.65}.pl .title{font-weight:600;font-size:13px}
.pl .n{fill:#10151f;text-anchor:middle;font-size:10.5px;pointer-events:none}
.pl .grid{stroke:currentColor;stroke-opacity:.13}.pl .wait{stroke:currentColor;stroke-opacity:.4;stroke-dasharray:2 2}
.pl .memory{fill:currentColor;fill-opacity:.16;stroke:currentColor;stroke-opacity:.5;stroke-width:.7}
.pl .odd{fill-opacity:.62}.pl .unit{fill:none;stroke:currentColor;stroke-width:1.4}
""" + "".join(
    f".pl .{op.value}{{fill:{colour}}}" for op, colour in COLOURS.items() if op in (*COMPUTE_OPS, Op.REDUCE_GRAD)
)
_LINK_STYLE = "".join(f".pl .{op.value}{{fill:{COLOURS[op]}}}" for op in (Op.UNSHARD, Op.OFFLOAD, Op.RELOAD))
_UPDATE_STYLE = f".pl .STEP{{fill:{COLOURS[Op.STEP]}}}"
_COLLECTIVE_STYLE = ".pl .collective{fill:#10151f;fill-opacity:.75}"
_CRITICAL_STYLE = ".pl .critical{fill:none;stroke:#d0021b;stroke-width:2.6}"
_STANDALONE_STYLE = ".pl .paper{fill:#fff}@media(prefers-color-scheme:dark){.pl{color:#e8eaf0}.pl .paper{fill:#14171f}}"


def timeline_svg(
    timelines: Sequence[Timeline],
    *,
    titles: Sequence[str] = (),
    seconds: float | None = None,
    standalone: bool = False,
    critical: bool = False,
) -> str:
    """Draw `timelines` one below the other, at the same scale.

    Args:
        timelines: at least one.
        titles: a heading per timeline; defaults to its name, makespan and bubble.
        seconds: what the width of a picture stands for, to make pictures comparable; defaults to the longest makespan.
        standalone: whether the picture is a separate file with a background and two colour schemes. Otherwise it
            inherits the text colour of the page.
        critical: whether to underline the spans on the critical path, if they are wide enough to draw.
    """
    seconds = seconds or max(timeline.makespan for timeline in timelines) or 1.0
    scale = (_WIDTH - _LEFT - _RIGHT) / seconds
    most = max((peak for timeline in timelines for peak in timeline.peak_activations), default=0.0) or 1.0
    tooltips = sum(len(row) for timeline in timelines for row in timeline.spans) <= _MOST_TOOLTIPS
    parts: list[str] = []
    y = 6.0
    for index, timeline in enumerate(timelines):
        title = titles[index] if index < len(titles) else _title(timeline)
        parts.append(f'<text class="title" x="0" y="{y + 12:.0f}">{escape(title)}</text>')
        y += 24
        path = list(critical_path(timeline)) if critical else []
        for rank, row in enumerate(timeline.spans):
            drawn = len(row) <= timeline.makespan * scale / 2  # its spans are wide enough
            own = [span for at, span in path if at == rank and drawn]
            parts.append(f'<text x="0" y="{y + 15:.0f}">rank {rank}</text>')
            parts.append(f'<text class="soft" x="{_WIDTH - _RIGHT + 6:.0f}" y="{y + _BAR + 11:.0f}">')
            tip = "<title>peak live activations; one micro-batch on one rank is 1</title>"
            parts.append(f"{tip}{number_text(timeline.peak_activations[rank])}</text>")
            parts += _bars(timeline, rank, row, y, scale, tooltips)
            parts += _collectives(timeline, rank, y, scale, tooltips)
            parts += [_underline(span, y, scale) for span in own if span.action.op not in LINKS]
            for link in timeline.links:
                y += _LINK + 1
                parts += _link(timeline, rank, link, y + _BAR - _LINK, scale, tooltips)
                parts += [_underline(s, y, scale) for s in own if LINKS.get(s.action.op) == link]
            parts.append(_memory(timeline.memory[rank], timeline.makespan, y + _BAR + 1 + _MEMORY, scale, most))
            y += _BAR + _MEMORY + _GAP
        y += 8
    parts[:0] = _grid(seconds, scale, y)
    parts += _legend(timelines, y + 30, critical)
    style = _STYLE + (_CRITICAL_STYLE if critical else "")
    style += _LINK_STYLE if any(timeline.links for timeline in timelines) else ""
    style += _COLLECTIVE_STYLE if any(timeline.collectives for timeline in timelines) else ""
    style += _UPDATE_STYLE if any(timeline.is_stream for timeline in timelines) else ""
    return _document(parts, style, "; ".join(map(_title, timelines)), y + 42, standalone)


def _document(parts: Sequence[str], style: str, label: str, height: float, standalone: bool) -> str:
    """The SVG element with its parts; a separate file has a margin and a background."""
    pad = 14 if standalone else 0
    box = f"{-pad} {-pad} {_WIDTH + 2 * pad:.0f} {height + 2 * pad:.0f}"
    paper = f'<rect class="paper" x="{-pad}" y="{-pad}" width="100%" height="100%"/>' if standalone else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="pl" viewBox="{box}" '
        f'style="width:100%;max-width:{_WIDTH:.0f}px;height:auto" role="img" '
        f'aria-label="{escape(label, quote=True)}">'
        f"<style>{style}{_STANDALONE_STYLE if standalone else ''}</style>{paper}{''.join(parts)}</svg>"
    )


def _title(timeline: Timeline) -> str:
    bubble = percent_text(timeline.bubble_fraction)
    text = f"{timeline.name}, {timeline.kind}: {seconds_text(timeline.makespan)}, bubble {bubble}"
    if timeline.is_stream and timeline.period_seconds is not None:
        text += f", {seconds_text(timeline.period_seconds)} per micro-batch in steady state"
    return text


def _bars(timeline: Timeline, rank: int, row: Sequence[Span], y: float, scale: float, tooltips: bool) -> list[str]:
    visible = timeline.makespan * scale
    if len(row) > visible / 2:
        return _dense_bars(row, timeline.makespan, y, visible)
    stages = timeline.placement.stages_of[rank]
    boxes: dict[str, list[str]] = {}
    partners, ends = dict(timeline.overlapped), {span.action: span.end for span in row}
    parts, numbers = [], []
    for span in row:
        (stage, op, _, _), start, end = span
        x, w = _LEFT + start * scale, (end - start) * scale
        if span.action in partners:
            frame = (ends[partners[span.action]] - start) * scale
            numbers.append(f'<rect class="unit" x="{x:.2f}" y="{y:.1f}" width="{frame:.2f}" height="{_BAR:.0f}"/>')
        if op in RECEIVES and w > 1:
            parts.append(f'<path class="wait" d="M{x:.2f} {y + _BAR / 2:.1f}h{w:.2f}"/>')
        if op is Op.STEP and w < _TICK:  # an optimizer step without duration is a line between two computations
            x, w = x - (_TICK - w) / 2, _TICK
        if op not in COLOURS or w <= 0:
            continue
        drawn = w - 0.6 if w > 3 else w
        kind = f"{op.value} odd" if stage in stages and stages.index(stage) % 2 else op.value
        if tooltips:
            text = f"{span.action} on rank {rank}: {seconds_text(start)} to {seconds_text(end)}"
            version = described(span, timeline.versions_used).get("version")
            text += "" if version is None else f", version {version}"
            parts.append(f'<rect class="{kind}" x="{x:.2f}" y="{y:.1f}" width="{drawn:.2f}" height="{_BAR:.0f}">')
            parts.append(f"<title>{text}</title></rect>")
        else:
            boxes.setdefault(kind, []).append(f"M{x:.2f} {y:.1f}h{drawn:.2f}v{_BAR:.0f}h-{drawn:.2f}z")
        number = label(span)
        if op in COMPUTE_OPS and w >= 6.5 * len(number) + 3:
            numbers.append(f'<text class="n" x="{x + w / 2:.2f}" y="{y + 15:.1f}">{number}</text>')
    parts += [f'<path class="{kind}" d="{"".join(paths)}"/>' for kind, paths in boxes.items()]
    return parts + numbers


def _collectives(timeline: Timeline, rank: int, y: float, scale: float, tooltips: bool) -> list[str]:
    """A strip at the lower edge of a rank's actions for each collective inside them."""
    if not timeline.collectives:
        return []
    row = [each for each in timeline.collectives[rank] if each.start < timeline.makespan]
    if not tooltips or len(row) > _MOST_TOOLTIPS:  # each column of two pixels shows their share as a height
        columns = max(1, round(timeline.makespan * scale / 2))
        spans = [(each.start, min(each.end, timeline.makespan)) for each in row]
        shares = busy_shares(spans, timeline.makespan, columns)
        step, boxes = timeline.makespan * scale / columns, []
        for column, share in enumerate(shares):
            top = f"M{_LEFT + column * step:.1f} {y + _BAR - share * _STRIP:.1f}"
            boxes.append(f"{top}h{step:.1f}V{y + _BAR:.1f}h-{step:.1f}z" if share > 0 else "")
        return [f'<path class="collective" d="{"".join(boxes)}"/>']
    parts = []
    for axis, name, start, end, size in row:
        text = f"{name} along {axis}: {seconds_text(end - start)}, {bytes_text(size)} sent"
        width = max(0.2, (min(end, timeline.makespan) - start) * scale)
        parts.append(
            f'<rect class="collective" x="{_LEFT + start * scale:.2f}" y="{y + _BAR - _STRIP:.1f}" width="{width:.2f}" '
            f'height="{_STRIP:.0f}"><title>{text}</title></rect>'
        )
    return parts


def _link(timeline: Timeline, rank: int, link: str, y: float, scale: float, tooltips: bool) -> list[str]:
    """The background spans of one link of a rank, on a separate lane below its computations."""
    parts = [f'<path class="grid" d="M{_LEFT:.1f} {y + _LINK:.1f}h{timeline.makespan * scale:.1f}"/>']
    row = [span for span in timeline.background[rank] if LINKS[span.action.op] == link and span.end > span.start]
    if len(row) > timeline.makespan * scale / 2:
        return parts + _dense_bars(row, timeline.makespan, y, timeline.makespan * scale, _LINK)
    for action, start, end in row:
        width = max(0.4, (end - start) * scale - 0.6)
        text = f"{action} on the {link} link of rank {rank}: {seconds_text(start)} to {seconds_text(end)}"
        parts.append(
            f'<rect class="{action.op.value}" x="{_LEFT + start * scale:.2f}" y="{y:.1f}" width="{width:.2f}" '
            f'height="{_LINK:.0f}">{f"<title>{text}</title>" if tooltips else ""}</rect>'
        )
    return parts


def _underline(span: Span, y: float, scale: float) -> str:
    x, w = _LEFT + span.start * scale, (span.end - span.start) * scale
    return f'<path class="critical" d="M{x:.2f} {y + _BAR - 1:.1f}h{max(0.0, w - 0.6):.2f}"/>'


def _dense_bars(row: Sequence[Span], makespan: float, y: float, visible: float, bar: float = _BAR) -> list[str]:
    """Spans too narrow to draw: each column of two pixels shows the share of each op as a height."""
    columns = max(1, round(visible / 2))
    step = visible / columns
    paths: dict[Op, list[str]] = {}
    for column, shares in enumerate(op_shares(row, makespan, columns)):
        bottom = y + bar
        for op in COLOURS:
            if op in shares:
                height = shares[op] * bar
                bottom -= height
                box = f"M{_LEFT + column * step:.1f} {bottom:.1f}h{step:.1f}v{height:.1f}h-{step:.1f}z"
                paths.setdefault(op, []).append(box)
    return [f'<path class="{op.value}" d="{"".join(parts)}"/>' for op, parts in paths.items()]


def _memory(points: Sequence[tuple[float, float]], makespan: float, base: float, scale: float, most: float) -> str:
    """A step curve of live activations above `base`; `most` activations have the full height."""
    columns = max(1, int(makespan * scale))
    if len(points) > 2 * columns:  # keep the maximum per pixel
        highest: dict[int, float] = {}
        for at, live in points:
            column = int(at * scale)
            highest[column] = max(highest.get(column, 0.0), live)
        points = [(column / scale, live) for column, live in sorted(highest.items())]
    path = [f"M{_LEFT:.1f} {base:.1f}"]
    for index, (at, live) in enumerate(points):
        if index + 1 < len(points) and (points[index + 1][0] - at) * scale < 0.05:
            continue  # one activation is freed as the next one is allocated: draw no notch
        path.append(f"H{_LEFT + at * scale:.2f}V{base - _MEMORY * live / most:.1f}")
    return f'<path class="memory" d="{"".join(path)}H{_LEFT + makespan * scale:.1f}V{base:.1f}z"/>'


def _grid(seconds: float, scale: float, bottom: float) -> list[str]:
    parts = []
    for tick in ticks(0.0, seconds, 8):
        x, y = f"{_LEFT + tick * scale:.1f}", f"{bottom + 11:.0f}"
        parts.append(f'<path class="grid" d="M{x} 26V{bottom:.0f}"/>')
        parts.append(f'<text class="soft" x="{x}" y="{y}" text-anchor="middle">{seconds_text(tick)}</text>')
    return parts


def _legend(timelines: Sequence[Timeline], y: float, critical: bool) -> list[str]:
    x, parts = _LEFT, []
    square = f'y="{y - 8:.0f}" width="10" height="10"'
    names = [(op.value, OP_NAMES[op], 28 + 6.2 * len(OP_NAMES[op])) for op in ops_in(timelines, instant=(Op.STEP,))]
    pairs = [("unit", "overlapped pair", 122.0)] if any(timeline.overlapped for timeline in timelines) else []
    if any(timeline.collectives for timeline in timelines):
        pairs.append(("collective", "collective inside a stage", 178.0))
    for kind, text, columns in (*names, *pairs, ("memory", "live activations (peak on the right)", 230.0)):
        corners = "" if kind in ("unit", "memory") else ' rx="2"'
        parts.append(f'<rect class="{kind}" x="{x:.0f}" {square}{corners}/>')
        parts.append(f'<text x="{x + 15:.0f}" y="{y + 1:.0f}">{text}</text>')
        x += columns
    if critical:
        parts.append(f'<path class="critical" d="M{x:.0f} {y - 3:.0f}h10"/>')
        parts.append(f'<text x="{x + 15:.0f}" y="{y + 1:.0f}">critical path</text>')
    return parts
