"""What the same faults do to pipeloom, and to torchrun with torch.distributed.checkpoint."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
import tokenize
from pathlib import Path
from typing import Any

from benchmarks.common.report import environment, markdown, save
from benchmarks.reliability.bits import flip_bits
from benchmarks.reliability.faults import DAMAGE, KINDS, draw
from benchmarks.reliability.report import parts
from benchmarks.reliability.runs import Runs
from benchmarks.reliability.systems import systems

from pipeloom.processes.launching.parents import adopting


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reliability", description=__doc__)
    parser.add_argument("--rounds", type=int, default=2, help="faults of each kind per system (default: 2)")
    parser.add_argument("--first", type=int, default=1, help="number of the first round (default: 1)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save_steps", type=int, default=8)
    parser.add_argument("--cap_seconds", type=float, default=90.0, help="wait for a sign of life (default: 90)")
    parser.add_argument("--bits", type=int, default=100, help="bits flipped in one checkpoint (default: 100)")
    parser.add_argument("--faults", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--systems", nargs="+", default=None, help="names as in the tables (default: all)")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "reliability.json")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the runs, and removes their directories
    machine, found = environment(), []
    with tempfile.TemporaryDirectory(prefix="pipeloom-benchmark-") as scratch, adopting():
        known = systems(Path(tokenize.__file__), options.steps, options.save_steps)
        runs = {}
        for index, name in enumerate(options.systems or known):
            runs[name] = Runs(known[name], Path(scratch, str(index)), options.cap_seconds)
            runs[name].reference()
            if options.bits:
                checkpoint = known[name].complete(Path(scratch, str(index), "reference"))[options.save_steps]
                found.append(flip_bits(known[name], checkpoint, options.bits, options.seed))
                _write(options, machine, found)
        for number in range(options.first, options.first + options.rounds):
            for kind in options.faults:
                fault = draw(kind, number, options.seed, options.steps, options.save_steps)
                for name, system in runs.items():
                    if kind in DAMAGE and name.endswith("`--recover`"):
                        continue  # it is started again from checkpoints, as without the option
                    began = time.monotonic()
                    found.append(system.hurt(fault, number)._asdict())
                    print(f"{time.monotonic() - began:.0f} s  {found[-1]}", file=sys.stderr, flush=True)
                    _write(options, machine, found)
    print(markdown(parts(found)))


def _write(options: argparse.Namespace, machine: dict[str, Any], found: list[dict[str, Any]]) -> None:
    """After each run, so that one that is interrupted has a result."""
    settings = {name: getattr(options, name) for name in ("steps", "save_steps", "seed", "cap_seconds")}
    save(options.output, settings, machine, found, parts(found))


if __name__ == "__main__":
    main()
