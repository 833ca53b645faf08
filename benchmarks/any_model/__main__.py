"""What it costs to enter a model: `pl.Pipe` beside torchgpipe, stages beside the plain module, traced pipelines."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from benchmarks.any_model import pipe, pipelines, stages
from benchmarks.common.report import environment, markdown, save

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.any_model", description=__doc__)
    parser.add_argument("what", choices=("pipe", "stages", "pipelines"), nargs="?", default="pipe")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3, help="of pipe: steps per round; the fastest counts")
    parser.add_argument("--output", type=Path, help="default: the JSON file in results/")
    arguments = parser.parse_args()
    machine, rounds = environment(), arguments.rounds
    settings = {"rounds": rounds}
    if arguments.what == "pipe":
        found = pipe.measure(rounds, arguments.steps)
        parts, heads = pipe.tables(found), pipe.headlines(found)
        settings |= {"steps": arguments.steps, "batch": pipe.BATCH, "chunks": pipe.CHUNKS}
    elif arguments.what == "stages":
        torch.set_num_threads(1)
        times = stages.measure(rounds)
        parts, heads, found = stages.tables(times), stages.headlines(times), {k: v._asdict() for k, v in times.items()}
    else:
        steps = pipelines.measure_pipelines(rounds)
        parts, heads, found = pipelines.tables(steps), pipelines.headlines(steps), dict(steps)
    print(markdown(parts))
    save(arguments.output or RESULTS / f"{arguments.what}.json", settings, machine, found, parts, headlines=heads)


if __name__ == "__main__":
    main()
