"""Draw every picture of the documentation and fill its tables: ``python docs/draw.py``.

A picture is a `pipeloom simulate` command with ``--svg``, a schedule that the text works out, the timelines of one run,
put by in run.json, or a schedule of the gallery. A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``.
tests/pure/test_docs.py fails where pictures or tables are not what this script makes.
"""

from __future__ import annotations

import ast
import json
import re
import runpy
from contextlib import redirect_stdout
from dataclasses import replace
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import pipeloom as pl
from pipeloom import cli
from pipeloom.common.quantities import number_text, percent_text, seconds_text
from pipeloom.ir.versions import versions_used
from pipeloom.passes import lower, repeat_steps
from pipeloom.plan.slicing import parse_slice_costs, slice_batch, slicing_timeline, uniform
from pipeloom.report import timeline_svg
from pipeloom.report.line_chart import Series, line_chart
from pipeloom.sim import Timeline
from pipeloom.train.config.option_list import options

DOCS = Path(__file__).parent
PICTURES = DOCS / "pictures"
TABLES_IN = (
    DOCS.parent / "README.md",
    DOCS / "reference" / "cli.md",
    DOCS / "reference" / "gallery.md",
    DOCS / "how-to" / "streams.md",
)
SIMULATED = {
    "naive.svg": "naive --ranks 4 --microbatches 4",
    "gpipe.svg": "gpipe --ranks 4 --microbatches 8",
    "1f1b.svg": "1f1b --ranks 4 --microbatches 8",
    "gpipe-latency.svg": "gpipe --ranks 4 --microbatches 8 --latency 0.5",
    "1f1b-latency.svg": "1f1b --ranks 4 --microbatches 8 --latency 0.5",
    "1f1b-many.svg": "1f1b --ranks 4 --microbatches 32",
    "pipedream.svg": "pipedream --ranks 4 --microbatches 16",
    "zero3.svg": "bfs --ranks 2 --microbatches 4 --data 4 --data-strategy zero3 --data-granularity chunk "
    "--data-bandwidth 1 --parameter-bytes 4",
}


def draw(directory: Path) -> list[Path]:
    """Write all pictures into `directory`; returns their paths."""
    for name, words in SIMULATED.items():
        with redirect_stdout(StringIO()):
            code = cli.main(["simulate", *words.split(), "--svg", str(directory / name)])
        if code:
            raise SystemExit(f"pipeloom simulate {words} --svg {directory / name}: exit code {code}")
    (directory / "eager-latency.svg").write_text(_eager() + "\n", encoding="utf-8")
    (directory / "run.svg").write_text(_run() + "\n", encoding="utf-8")
    (directory / "steps.svg").write_text(_steps() + "\n", encoding="utf-8")
    (directory / "pipedream-replicas.svg").write_text(_replicas() + "\n", encoding="utf-8")
    (directory / "slices.svg").write_text(_slices() + "\n", encoding="utf-8")
    (directory / "convergence.svg").write_text(_convergence() + "\n", encoding="utf-8")
    (directory / "rooms.svg").write_text(_rooms() + "\n", encoding="utf-8")
    (directory / "layouts.svg").write_text(_layouts() + "\n", encoding="utf-8")
    (directory / "experts.svg").write_text(_experts() + "\n", encoding="utf-8")
    shown = _gallery_timelines()
    for name, timeline in shown.items():
        (directory / f"gallery-{name}.svg").write_text(_gallery_picture(timeline) + "\n", encoding="utf-8")
    drawn_here = "eager-latency run steps slices convergence pipedream-replicas rooms layouts experts"
    more = (f"{name}.svg" for name in drawn_here.split())
    return [directory / name for name in (*SIMULATED, *more, *(f"gallery-{name}.svg" for name in shown))]


def _eager() -> str:
    """The schedule of the tutorial new-schedule.md, built by the code on that page."""
    page = (DOCS / "tutorials" / "new-schedule.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(next(block for block in blocks if "def eager_one_f_one_b" in block), names)
    schedule = names["eager_one_f_one_b"](num_ranks=4, num_microbatches=8)
    costs = pl.Costs.uniform(forward=1.0, backward=2.0)
    return timeline_svg([pl.simulate(schedule, costs, pl.Network(latency_seconds=0.5))], standalone=True)


def _experts() -> str:
    picture: str = runpy.run_path(str(DOCS / "draw_experts.py"))["experts_picture"]()
    return picture


def _layouts() -> str:
    picture: str = runpy.run_path(str(DOCS / "draw_layouts.py"))["layouts_picture"]()
    return picture


def _run() -> str:
    """The step of a real run, measured over predicted: timelines.json of `pipeloom train`."""
    kinds = json.loads((PICTURES / "run.json").read_text(encoding="utf-8"))
    timelines = [Timeline.from_json(json.dumps(kinds[kind])) for kind in ("measured", "predicted")]
    titles = [
        f"{kind}: {seconds_text(timeline.makespan)}, bubble {100 * timeline.bubble_fraction:.1f} %"
        for kind, timeline in zip(("measured", "predicted"), timelines, strict=True)
    ]
    return timeline_svg(timelines, titles=titles, standalone=True)


def _replicas() -> str:
    """A first stage with twice the work of the second, on two ranks."""
    schedule = pl.schedules.pipedream(num_ranks=3, num_microbatches=16, replicas=(2, 1))
    costs = pl.Costs.per_stage(forward=[2.0, 1.0], backward=[4.0, 2.0])
    return timeline_svg([pl.simulate(lower(schedule), costs)], standalone=True)


def _convergence() -> str:
    """Validation losses by tokens and by time: what `python -m benchmarks.convergence --curves` wrote."""
    curves = json.loads((PICTURES / "convergence.json").read_text(encoding="utf-8"))
    styles = dict(zip(curves, "abcd", strict=False))
    width, height, head = 460.0, 300.0, 64.0
    charts = []
    for axis, label in (("tokens", "tokens"), ("seconds", "seconds")):
        series = [
            Series(
                label=name,
                points=list(zip(curve[axis], curve["loss"], strict=True)),
                style=styles[name],
                marks=True,
            )
            for name, curve in curves.items()
        ]
        charts.append(line_chart(series, width=width, height=height, x_label=label))
    colours = dict(zip("abcd", ("#0072b2", "#d55e00", "#009e73", "#cc79a7"), strict=True))
    style = "".join(
        f".pl .line.{key}{{stroke:{value};fill:none;stroke-width:1.8}}.pl circle.{key}{{fill:{value}}}"
        for key, value in colours.items()
    )
    style += (
        ".pl{font:12px system-ui,sans-serif;color:#222;background:#fff}.pl text{fill:currentColor}"
        ".pl .grid{stroke:currentColor;stroke-opacity:.13}.pl .paper{fill:#fff}"
        "@media(prefers-color-scheme:dark){.pl{color:#ddd;background:#16181c}.pl .paper{fill:#16181c}}"
    )
    legend = "".join(
        f'<rect x="{10 + 190 * k}" y="32" width="14" height="14" fill="{colours[styles[name]]}"/>'
        f'<text x="{30 + 190 * k}" y="44">{name}</text>'
        for k, name in enumerate(curves)
    )
    placed = "".join(
        chart.replace("<svg ", f'<svg x="{k * (width + 10):.0f}" y="{head:.0f}" width="{width}" height="{height}" ', 1)
        for k, chart in enumerate(charts)
    )
    total = 2 * width + 10
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="pl" viewBox="0 0 {total:.0f} {head + height:.0f}" role="img" '
        f'aria-label="validation loss of {", ".join(curves)}"><style>{style}</style>'
        f'<rect class="paper" width="100%" height="100%"/><text x="10" y="20">validation loss, nats per byte</text>'
        f"{legend}{placed}</svg>"
    )


def _slices() -> str:
    """A sequence whole, in even slices and in the best ones, by the costs that slicing.md shows."""
    page = (DOCS / "how-to" / "slicing.md").read_text(encoding="utf-8")
    costs = parse_slice_costs(next(iter(re.findall(r"```json\n(.*?)```", page, re.DOTALL))))
    found = slice_batch(costs, sequence=2048, num_ranks=4, grid=32).slices[0]
    cuts = {"whole": (2048,), "4 even slices": uniform(sequence=2048, num_slices=4), f"{len(found)} slices": found}
    timelines = [slicing_timeline(costs, [lengths], num_ranks=4) for lengths in cuts.values()]
    titles = [f"{name}: {seconds_text(each.makespan)}" for name, each in zip(cuts, timelines, strict=True)]
    return timeline_svg(timelines, titles=titles, standalone=True)


@cache
def _gallery_timelines() -> dict[str, Timeline]:
    """Every schedule on 4 ranks and 8 micro-batches, of 2 slices where there are any; F, I, W take 1 s.

    Streams with their updates.
    """
    found = {}
    for name, family in pl.schedules.FAMILIES.items():
        schedule = family(num_ranks=4, num_microbatches=8, num_slices=2 if family.sliced else 1)
        found[name] = pl.simulate(lower(schedule) if family.stream else schedule, pl.Costs.uniform())
    return found


def _gallery_picture(timeline: Timeline) -> str:
    """All at one scale: naive is three times as long as the others, so it is cut off, and its title says so."""
    seconds = max(shown.makespan for name, shown in _gallery_timelines().items() if name != "naive")
    title = f"{timeline.name}: {number_text(timeline.makespan)} s, bubble {percent_text(timeline.bubble_fraction)}"
    if timeline.makespan > seconds * (1 + 1e-9):
        title += f" (the first {number_text(seconds)} s)"
        spans = tuple(tuple(span for span in row if span.end <= seconds) for row in timeline.spans)
        memory = tuple(tuple(point for point in points if point[0] < seconds) for points in timeline.memory)
        timeline = replace(timeline, spans=spans, memory=memory)
    return timeline_svg([timeline], titles=[title], seconds=seconds, standalone=True)


def _gallery() -> str:
    """The numbers of every schedule in one table, then its picture and where it comes from."""
    rows = ["| schedule | seconds | bubble | peak live activations on ranks 0 to 3 |", "|---|---|---|---|"]
    sections = []
    for name, timeline in _gallery_timelines().items():
        family = pl.schedules.FAMILIES[name]
        bubble = percent_text(timeline.bubble_fraction)
        peaks = ", ".join(map(number_text, timeline.peak_activations))
        rows.append(f"| [{name}](#{name}) | {number_text(timeline.makespan)} | {bubble} | {peaks} |")
        held = "one stage" if timeline.num_chunks == 1 else f"{timeline.num_chunks} virtual stages"
        cut = f", {timeline.num_slices} slices per micro-batch" if family.sliced else ""
        sections.append(
            f"## {name}\n\n{family.paper[0].upper()}{family.paper[1:]}. "
            f"{held.capitalize()} per rank{cut}; {family.constraints}.\n"
            f"Bubble `{family.bubble}`, here {bubble}; "
            f"peak live activations on rank d `{family.peak}`, here {peaks}.\n\n"
            f"![{name} on 4 ranks and 8 micro-batches](../pictures/gallery-{name}.svg)"
        )
    return "\n".join(rows) + "\n\n" + "\n\n".join(sections)


def _steps() -> str:
    """Three steps of ZB-H2 one behind the other, with a barrier between them and without."""
    schedule, costs, num_steps = pl.schedules.zb_h2(num_ranks=4, num_microbatches=7), pl.Costs.uniform(), 3
    one, free = pl.simulate(schedule, costs), pl.simulate(repeat_steps(schedule, num_steps), costs)
    starts = [step * one.makespan for step in range(num_steps)]
    barrier = replace(
        one,
        spans=tuple(
            tuple(
                span._replace(
                    action=span.action._replace(microbatch=span.action.microbatch + step * schedule.num_microbatches),
                    start=span.start + start,
                    end=span.end + start,
                )
                for step, start in enumerate(starts)
                for span in row
            )
            for row in one.spans
        ),
        memory=tuple(tuple((at + start, live) for start in starts for at, live in row) for row in one.memory),
        ideal_seconds=num_steps * one.ideal_seconds,
        num_microbatches=free.num_microbatches,
    )
    titles = [
        f"zb-h2, 3 steps {kind} a barrier: {timeline.makespan:g} s, bubble {100 * timeline.bubble_fraction:.1f} %"
        for kind, timeline in (("with", barrier), ("without", free))
    ]
    return timeline_svg([barrier, free], titles=titles, standalone=True)


def _allowed_imports() -> dict[str, set[str]]:
    """Which packages each package may import: the table that tests/pure/test_import_rule.py enforces."""
    path = DOCS.parent / "tests" / "pure" / "test_import_rule.py"
    names: dict[str, Any] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and not any(isinstance(part, ast.Call) for part in ast.walk(node.value)):
            names[ast.unparse(node.targets[0])] = eval(ast.unparse(node.value), names)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ALLOWED":
            names["ALLOWED"] = eval(ast.unparse(node.value), names | {"set": set})
    allowed: dict[str, set[str]] = names["ALLOWED"]
    return {room: others - {room, "common"} for room, others in allowed.items() if room != "common"}


_LEFT_TO_RIGHT = "models data schedules report sim ir passes slicing plan training split transport processes"


def _rooms() -> str:
    """The packages in layers, each above those that it imports. An arrow is left out where others imply it."""
    allowed = _allowed_imports()

    @cache
    def below(room: str) -> frozenset[str]:
        return frozenset(allowed[room]).union(*map(below, allowed[room]))

    @cache
    def layer(room: str) -> int:
        return 1 + max(map(layer, allowed[room]), default=-1)

    rows: dict[int, list[str]] = {}
    for room in sorted(allowed, key=_LEFT_TO_RIGHT.find):
        rows.setdefault(layer(room), []).append(room)
    width, height, box, gap = 860.0, 76.0, 104.0, 34.0
    across = {
        room: (k + 0.5) / len(row) if len(row) > 1 else 0.7 for row in rows.values() for k, room in enumerate(row)
    }
    across["report"] = 0.42  # beside the arrows of `plan`
    place = {room: (across[room] * width, 20 + (max(rows) - layer(room)) * height) for room in allowed}
    arrows, boxes = [], []
    for room in sorted(allowed):
        x, y = place[room]
        for other in sorted(allowed[room]):
            if not any(other in below(between) for between in allowed[room]):
                a, b = place[other]
                arrows.append(f'<path class="arrow" d="M{x:.0f} {y + gap:.0f}L{a:.0f} {b - 3:.0f}"/>')
        boxes.append(
            f'<rect class="room" x="{x - box / 2:.0f}" y="{y:.0f}" width="{box:.0f}" height="{gap:.0f}" rx="6"/>'
            f'<text x="{x:.0f}" y="{y + 22:.0f}" text-anchor="middle">{room}</text>'
        )
    style = (
        ".pl{font:13px system-ui,sans-serif;color:#222;background:#fff}.pl text{fill:currentColor}"
        ".pl .paper{fill:#fff}.pl .room{fill:#dcebf7;stroke:#0072b2}"
        ".pl .arrow{stroke:#888;fill:none;marker-end:url(#head)}"
        "@media(prefers-color-scheme:dark){.pl{color:#ddd;background:#16181c}.pl .paper{fill:#16181c}"
        ".pl .room{fill:#12384f}}"
    )
    head = (
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#888"/></marker></defs>'
    )
    total = 20 + (max(rows) + 1) * height
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="pl" viewBox="0 0 {width:.0f} {total:.0f}" role="img" '
        f'aria-label="packages of pipeloom and what they import"><style>{style}</style>{head}'
        f'<rect class="paper" width="100%" height="100%"/>{"".join(arrows)}{"".join(boxes)}</svg>'
    )


def fill_tables(text: str) -> str:
    """`text` with every marked table made anew."""

    def table(match: re.Match[str]) -> str:
        return f"<!-- table: {match[1]} -->\n{TABLES[match[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- table: (\w+) -->\n.*?<!-- end -->", table, text, flags=re.DOTALL)


def _schedules() -> str:
    rows = ["| schedule | paper | bubble | peak live activations on rank d |", "|---|---|---|---|"]
    rows += [f"| `{f.name}` | {f.paper} | `{f.bubble}` | `{f.peak}` |" for f in pl.schedules.FAMILIES.values()]
    return "\n".join(rows)


def _versions() -> str:
    """The versions that the first micro-batches use on 4 ranks."""
    streams = {
        "stash": pl.schedules.pipedream(num_ranks=4, num_microbatches=24),
        "vertical": pl.schedules.pipedream(num_ranks=4, num_microbatches=24, weights="vertical"),
        "2BW": pl.schedules.pipedream_2bw(num_ranks=4, num_microbatches=24),
    }
    rows = [f"| micro-batch | {' | '.join(streams)} |", f"|---|{'---|' * len(streams)}"]
    for b in range(10):
        used = (" ".join(str(versions_used(each)[stage, b]) for stage in range(4)) for each in streams.values())
        rows.append(f"| {b} | {' | '.join(f'`{versions}`' for versions in used)} |")
    return "\n".join(rows)


def _train() -> str:
    rows = ["| option | default | meaning |", "|---|---|---|", "| `--config FILE` | | YAML file with options |"]
    for option in options():
        shown = option.default_text if option.default is None else f"`{option.default_text}`"
        rows.append(f"| `--{option.key}` | {shown} | {option.help_with_choices} |")
    return "\n".join(rows)


def _commands() -> str:
    rows = ["| command | what it does |", "|---|---|"]
    rows += [f"| [`{name}`](#{name}) | {text} |" for name, text in cli.COMMANDS.items()]
    return "\n".join(rows)


TABLES = {
    "commands": _commands,
    "gallery": _gallery,
    "schedules": _schedules,
    "train": _train,
    "versions": _versions,
}


def main() -> None:
    """Write everything into its place."""
    for path in draw(PICTURES):
        print(path)
    for page in TABLES_IN:
        page.write_text(fill_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
        print(page)


if __name__ == "__main__":
    main()
