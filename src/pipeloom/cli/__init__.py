"""The command line: one thin module per command, imported only when its command runs."""

import importlib
import os
import sys

from pipeloom.errors import InputError, PipeloomError, unwrapped
from pipeloom.version import __version__

# Each command and its purpose; the module of the same name has `main(argv) -> int`.
COMMANDS = {
    "train": "train a language model through a pipeline",
    "launch": "print the file that starts a run on a cluster: SLURM, Kubernetes, Ray, SkyPilot, torchrun",
    "plan": "choose everything: the fastest way to train a model on a cluster",
    "simulate": "simulate a schedule: makespan, bubble, live activations, timeline",
    "collectives": "draw collectives step by step, and compare their costs on a cluster",
    "memory": "predict peak memory per rank, and select memory-saving options that fit a limit",
    "slice": "choose sequence slices that shorten a step",
    "partition": "choose stage boundaries and replicas per stage from layer times",
    "tune": "find the number of micro-batches of a one-process pipeline by experiment",
    "schedules": "list schedules with paper, constraints, and formulas for bubble and peak activations",
    "watch": "show a run in the browser while it trains",
    "report": "regenerate report.html of a run",
    "chaos": "inject faults into a training job, and compare it with a reference run",
    "checkpoint": "list, verify or convert checkpoints",
    "doctor": "check this machine: packages, devices, ports, shared memory",
}

HELP = """\
usage: pipeloom COMMAND [options]

pipeline-parallel training for PyTorch

commands:
{commands}

`pipeloom COMMAND --help` shows the options of a command, `pipeloom --version` the version

examples:
  pipeloom train                                        train a small GPT on Python source code with two ranks
  pipeloom train --parallel.pipeline 4 --schedule gpipe --data.path 'corpus/*.txt' --output_dir runs/corpus
  pipeloom train --config runs/corpus/config.yaml --resume_from_checkpoint latest --steps 400
  torchrun --nproc-per-node 2 -m pipeloom train         default training under torchrun on one node
  pipeloom simulate 1f1b --ranks 4 --microbatches 8     a timeline in the terminal
  pipeloom watch runs/corpus                            a page in the browser while it trains
  pipeloom report runs/corpus                           report.html from the metrics of a run
exit codes: 0 success, 1 failure during the run, 2 invalid input, 75 pre-empted after a save, 128+N ended by signal N
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command that `argv` names (default: the command line of this process); returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    try:
        from pipeloom.cli.common.standard_streams import standard_streams

        only_shown = any(word.startswith(("-h", "--help", "--print_config")) for word in words)
        with standard_streams(lasting=words[:1] == ["train"] and not only_shown):
            return _run(words)
    except PipeloomError as error:
        return _fail(str(error), 2 if isinstance(error, InputError) else 1)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:  # as in `pipeloom schedules | head`
        return 1
    except Exception as error:
        # Python 3.11 wraps an interrupt that comes while a class is made.
        if not isinstance(error.__cause__, KeyboardInterrupt):
            raise
        return _fail("interrupted", 130)


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        width = max(map(len, COMMANDS))
        rows = "\n".join(f"  {name:<{width}}  {text}" for name, text in COMMANDS.items())
        print(HELP.format(commands=rows))
        return 0 if words else 2
    if words[0] == "--version":
        print(f"pipeloom {__version__}")
        return 0
    if words[0] not in COMMANDS:
        from pipeloom.cli.common.parser import did_you_mean

        kind = "option" if words[0].startswith("-") else "command"
        hint = did_you_mean(words[0], [*COMMANDS, "--help", "--version"]) or "see `pipeloom --help`"
        return _fail(f"{kind} {words[0]!r} is unknown: the commands are {', '.join(COMMANDS)}; {hint}", 2)
    if words[0] == "train":  # before its imports take time
        from pipeloom.processes.launching.torchrun import end_with_agent

        end_with_agent(os.environ)
    try:
        return int(importlib.import_module(f"pipeloom.cli.{words[0]}").main(words[1:]))
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)


def _fail(message: str, code: int) -> int:
    from contextlib import suppress

    with suppress(OSError):  # standard error is closed too
        sys.stderr.write(f"pipeloom: error: {unwrapped(message)}\n")
    return code
