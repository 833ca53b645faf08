"""`plan_html`: plans side by side as an offline HTML page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from pipeloom.common.quantities import bytes_text, percent_text, seconds_text
from pipeloom.report.html import render
from pipeloom.report.svg import timeline_svg
from pipeloom.sim.timeline import Timeline

_COLOURS = (
    "#56b4e9",
    "#0072b2",
    "#009e73",
    "#cc79a7",
    "#d55e00",
    "#e69f00",
    "#f0e442",
    "#b3aa99",
    "#7a6ff0",
    "#8c564b",
)
_LONGEST = 4.0  # of the bars at one scale, beside the best plan's
_MOST_BARS = 64  # ranks whose memory is drawn one by one


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownPlan:
    """One plan on the page.

    Attributes:
        name: above its bars.
        cells: its row of the table.
        seconds: of a step, by what takes them; the same names for all plans.
    """

    name: str
    cells: Sequence[str]
    seconds: Mapping[str, float]


def plan_html(
    plans: Sequence[ShownPlan],
    *,
    title: str,
    lead: str,
    columns: Sequence[str],
    peak_bytes: Sequence[float],
    memory_bytes: float | None,
    timeline: Timeline,
    reasons: Sequence[str],
    refused: Mapping[str, int],
    others: Sequence[ShownPlan] = (),
) -> str:
    """A page with a table of plans, where their time goes, the memory and the timeline of the best plan, and refusals.

    Args:
        plans: best first.
        title: what was planned.
        lead: what was searched.
        columns: heads of the table.
        peak_bytes: of the best plan, per rank.
        memory_bytes: that a plan may use of a device; None: any.
        timeline: of the best plan.
        reasons: sentences that say why it won, and what others lack.
        refused: number of configurations by reason.
        others: plans whose time is compared, beside those of the table.
    """
    totals = [sum(plan.seconds.values()) for plan in (*plans, *others)]
    longest = min(max(totals), _LONGEST * totals[0])
    memory, note = _memory(peak_bytes, memory_bytes), ""
    if memory_bytes is not None:
        note += f" The full width is {bytes_text(memory_bytes)}, which a plan may use of a device."
    if len(peak_bytes) > _MOST_BARS:
        note += f" Neighbouring ranks with the same peak share a row; at most {_MOST_BARS} rows, those with most."
    names = [name for name in plans[0].seconds if any(plan.seconds[name] > 0 for plan in (*plans, *others))]
    colours = {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(plans[0].seconds)}
    return render(
        "plan.html.j2",
        title=title,
        lead=lead,
        columns=columns,
        rows=[plan.cells for plan in plans],
        reasons=reasons,
        legend=[(name, colours[name]) for name in names],
        bars=[_bar(plan, names, colours, longest) for plan in (*plans, *others)],
        memory=memory,
        memory_note=note,
        picture=Markup(timeline_svg([timeline])),
        refused=[(f"{count:,}", reason) for reason, count in refused.items()],
    )


def _bar(plan: ShownPlan, names: Sequence[str], colours: Mapping[str, str], longest: float) -> dict[str, object]:
    """The parts of one stacked bar, with their widths in percent of the longest one; a longer one has its own scale."""
    total = sum(plan.seconds.values())
    full = max(longest, total)
    parts = [
        {
            "width": f"{100 * plan.seconds[name] / full:.2f}",
            "colour": colours[name],
            "tip": f"{name}: {seconds_text(plan.seconds[name])}, {percent_text(plan.seconds[name] / total)}",
        }
        for name in names
        if plan.seconds[name] > 0
    ]
    name = plan.name if total <= longest else f"{plan.name} (not to scale)"
    return {"name": name, "total": seconds_text(total), "parts": parts}


def _memory(peaks: Sequence[float], capacity: float | None) -> list[dict[str, str]]:
    """A bar per rank; of many ranks, one for each run of equal peaks, at most `_MOST_BARS`."""
    runs: list[tuple[int, int, float]] = []
    for rank, peak in enumerate(peaks):
        if len(peaks) > _MOST_BARS and runs and runs[-1][2] == peak:
            runs[-1] = (runs[-1][0], rank, peak)
        else:
            runs.append((rank, rank, peak))
    most = capacity or max(peaks)
    shown = [
        {
            "name": f"rank {first}" if first == last else f"ranks {first} to {last}",
            "bytes": bytes_text(peak),
            "share": f"{100 * peak / most:.1f}",
        }
        for first, last, peak in runs
    ]
    if len(shown) <= _MOST_BARS:
        return shown
    kept = sorted(range(len(runs)), key=lambda at: -runs[at][2])[:_MOST_BARS]
    return [shown[at] for at in sorted(kept)]
