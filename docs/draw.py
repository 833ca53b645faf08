"""Draw every picture of the documentation and fill its tables: ``python docs/draw.py``.

A picture is a `pipeloom simulate` command with ``--svg``, a schedule that the text works out, or the timelines of one
run, put by in run.json. A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``. tests/pure/test_docs.py
fails where pictures or tables are not what this script makes.
"""

from __future__ import annotations

import json
import re
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pipeloom as pl
from pipeloom import cli
from pipeloom.passes import repeat_steps
from pipeloom.report import timeline_svg
from pipeloom.report.drawing import seconds_text
from pipeloom.sim import Timeline
from pipeloom.train.config import options

DOCS = Path(__file__).parent
PICTURES = DOCS / "pictures"
TABLES_IN = (DOCS.parent / "README.md", DOCS / "cli.md")
SIMULATED = {
    "naive.svg": "naive --ranks 4 --microbatches 4",
    "gpipe.svg": "gpipe --ranks 4 --microbatches 8",
    "1f1b.svg": "1f1b --ranks 4 --microbatches 8",
    "gpipe-latency.svg": "gpipe --ranks 4 --microbatches 8 --latency 0.5",
    "1f1b-latency.svg": "1f1b --ranks 4 --microbatches 8 --latency 0.5",
    "1f1b-many.svg": "1f1b --ranks 4 --microbatches 32",
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
    return [directory / name for name in (*SIMULATED, "eager-latency.svg", "run.svg", "steps.svg")]


def _eager() -> str:
    """The schedule that new-schedule.md works out, made by the code that stands there."""
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "new-schedule.md").read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(next(block for block in blocks if "def eager_one_f_one_b" in block), names)
    schedule = names["eager_one_f_one_b"](num_ranks=4, num_microbatches=8)
    costs = pl.Costs.uniform(forward=1.0, backward=2.0)
    return timeline_svg([pl.simulate(schedule, costs, pl.Network(latency_seconds=0.5))], standalone=True)


def _run() -> str:
    """The step of a real run, measured over predicted: timelines.json of `pipeloom train`."""
    kinds = json.loads((PICTURES / "run.json").read_text(encoding="utf-8"))
    timelines = [Timeline.from_json(json.dumps(kinds[kind])) for kind in ("measured", "predicted")]
    titles = [
        f"{kind}: {seconds_text(timeline.makespan)}, bubble {100 * timeline.bubble_fraction:.1f} %"
        for kind, timeline in zip(("measured", "predicted"), timelines, strict=True)
    ]
    return timeline_svg(timelines, titles=titles, standalone=True)


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


def fill_tables(text: str) -> str:
    """`text` with every marked table made anew."""

    def table(match: re.Match[str]) -> str:
        rows = {"schedules": _schedules, "train": _train}[match[1]]()
        return f"<!-- table: {match[1]} -->\n{rows}\n<!-- end -->"

    return re.sub(r"<!-- table: (\w+) -->\n.*?<!-- end -->", table, text, flags=re.DOTALL)


def _schedules() -> str:
    rows = ["| schedule | paper | bubble | most live activations on rank d |", "|---|---|---|---|"]
    rows += [f"| `{f.name}` | {f.paper} | `{f.bubble}` | `{f.peak}` |" for f in pl.schedules.FAMILIES.values()]
    return "\n".join(rows)


def _train() -> str:
    rows = ["| option | default | meaning |", "|---|---|---|", "| `--config FILE` | | YAML file with these options |"]
    for key, _, default, text in options():
        shown = str(default).lower() if isinstance(default, bool) else "" if default is None else f"`{default}`"
        rows.append(f"| `--{key}` | {shown} | {text} |")
    return "\n".join(rows)


def main() -> None:
    """Write everything into its place."""
    for path in draw(PICTURES):
        print(path)
    for page in TABLES_IN:
        page.write_text(fill_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
        print(page)


if __name__ == "__main__":
    main()
