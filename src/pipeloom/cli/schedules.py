"""`pipeloom schedules`: every schedule with its paper, its constraints and its closed forms."""

from __future__ import annotations

import json
from collections.abc import Sequence

from pipeloom.cli.parser import Parser
from pipeloom.schedules import FAMILIES

_COLUMNS = ("name", "paper", "constraints", "bubble", "peak")


def main(argv: Sequence[str]) -> int:
    """List the schedules; returns the exit code."""
    parser = Parser(
        prog="pipeloom schedules",
        description="Every schedule: its paper, what its sizes have to satisfy, and the closed forms of its bubble\n"
        "(idle fraction for uniform stages without latency) and of its peak of live activations on rank d,\n"
        "for p ranks, m micro-batches, v chunks a rank and k slices of a sequence.",
        examples="""
            pipeloom schedules
            pipeloom schedules --json
        """,
    )
    parser.add_argument("--json", action="store_true", help="one JSON array instead of a table")
    options = parser.parse_args(list(argv))
    rows = [{column: getattr(family, column) for column in _COLUMNS} for family in FAMILIES.values()]
    if options.json:
        print(json.dumps(rows, indent=1))
        return 0
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("name", "paper", "constraints", "bubble", "peak on rank d"):
        table.add_column(column, style="bold" if column == "name" else None, no_wrap=column == "name", overflow="fold")
    for row in rows:
        table.add_row(*row.values())
    Console(highlight=False, markup=False).print(table)
    return 0
