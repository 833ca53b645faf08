"""What it costs to enter a model: `pl.Pipe` beside torchgpipe."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.any_model import pipe
from benchmarks.common.report import environment, markdown, save


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.any_model", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3, help="steps per round; the fastest counts")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "pipe.json")
    arguments = parser.parse_args()
    machine = environment()
    results = pipe.measure(arguments.rounds, arguments.steps)
    parts = pipe.tables(results)
    print(markdown(parts))
    settings = {"rounds": arguments.rounds, "steps": arguments.steps, "batch": pipe.BATCH, "chunks": pipe.CHUNKS}
    save(arguments.output, settings, machine, results, parts, headlines=pipe.headlines(results))


if __name__ == "__main__":
    main()
