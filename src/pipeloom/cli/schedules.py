"""`pipeloom schedules`: every schedule with its paper, its constraints and its closed forms."""

import json
import sys
from collections.abc import Sequence

from pipeloom.cli.common.parser import Parser
from pipeloom.common.quantities import table_lines
from pipeloom.schedules import FAMILIES

_COLUMNS = ("name", "paper", "constraints", "bubble", "peak")


def main(argv: Sequence[str]) -> int:
    """List the schedules; returns the exit code."""
    parser = Parser(
        prog="pipeloom schedules",
        description="List every schedule with its paper, the constraints on its sizes, and closed forms of its bubble "
        "(idle fraction for uniform stages without latency) and of its peak live activations on rank d, for p ranks, "
        "m micro-batches, v chunks per rank and k slices per sequence.",
        examples="""
            pipeloom schedules
            pipeloom schedules --json
        """,
    )
    parser.add_argument("--json", action="store_true", help="output as one JSON array")
    options = parser.parse_args(list(argv))
    rows = [{column: getattr(family, column) for column in _COLUMNS} for family in FAMILIES.values()]
    if options.json:
        print(json.dumps(rows, indent=1))
        return 0
    headings = (*_COLUMNS[:-1], "peak on rank d")
    if not sys.stdout.isatty():  # whole lines, for grep and less
        print("\n".join(table_lines([headings, *([*row.values()] for row in rows)])))
        return 0
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in headings:
        table.add_column(column, style="bold" if column == "name" else None, no_wrap=column == "name", overflow="fold")
    for row in rows:
        table.add_row(*row.values())
    Console(highlight=False, markup=False).print(table)
    return 0
