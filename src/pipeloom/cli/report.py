"""`pipeloom report`: writes the report of a run again."""

from collections.abc import Sequence
from pathlib import Path

from pipeloom.cli.common.parser import Parser


def main(argv: Sequence[str]) -> int:
    """Write report.html and timeline.json.gz of a run and print the path of the report; returns the exit code."""
    parser = Parser(
        prog="pipeloom report",
        description="Write report.html and timeline.json.gz of a run again, from its metrics.jsonl, config.yaml and "
        "timelines.json.",
        examples="""
            pipeloom report runs/corpus
        """,
    )
    parser.add_argument("output_dir", type=str, metavar="DIR", help="output directory of a run")
    options = parser.parse_args(list(argv))
    from pipeloom.report import write_report

    print(write_report(Path(options.output_dir)))
    return 0
