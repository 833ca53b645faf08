"""The tables of docs/explanation/predictions.md: `python -m tests.pure.predictions_page` predicts all runs anew."""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path

from pipeloom.plan.costs.named_clusters import CLUSTERS
from tests.pure.published_runs import TABLES, Run
from tests.pure.published_zero_bubble import zero_bubble

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "predictions.md"
_HEADER = "| run | use | measured | predicted | off |\n|---|---|---|---|---|"


def row(run: Run) -> str:
    """One line of a table."""
    measured, predicted = run.seconds, run.predicted()
    off = 100 * (predicted / measured - 1)
    return f"| {run.name} | {run.use} | {measured:.3g} s | {predicted:.3g} s | {off:+.1f} % |"


def tables() -> str:
    """All tables in Markdown."""
    runs = [run for table in (*TABLES, zero_bubble) for run in table()]
    parts = []
    for name, group in groupby(runs, key=lambda run: (run.table, run.cluster, run.software)):
        table, cluster, software = name
        where = f"`--cluster {cluster}" if cluster in CLUSTERS else f"A cluster file: {cluster}; `"
        title = f"### {table}\n\n{where} --software {software}`".replace("` --", "`--")
        parts.append("\n".join([f"{title}\n\n{_HEADER}", *map(row, group)]))
    return "\n\n".join(parts)


def fill(text: str, made: str) -> str:
    """The page with `made` between its markers."""
    return re.sub(
        r"(<!-- runs -->\n).*?(\n<!-- end -->)", lambda match: f"{match[1]}{made}{match[2]}", text, flags=re.DOTALL
    )


def main() -> None:
    """Write the page anew, and print its tables."""
    made = tables()
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8"), made), encoding="utf-8")
    print(made)


if __name__ == "__main__":
    main()
