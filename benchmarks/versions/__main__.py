"""Is this checkout as fast as another one: step time, overhead per action, and the simulator, in interleaved rounds."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from benchmarks.common.report import environment, markdown, save, table
from benchmarks.common.statistics import Spread, ratio, spread

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("4x256 M=8", "1x64 M=8", "1x64 M=16", "1x16 w128 M=16", "action_overhead", "simulator")


class Checkout:
    """A process that measures one checkout, one round per call."""

    def __init__(self, root: Path, parts: list[str]) -> None:
        environment_ = {**os.environ, "PYTHONPATH": os.pathsep.join((str(root), str(root / "src")))}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("subject.py")), *parts],
            cwd=root,
            env=environment_,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def answer(self) -> dict[str, float]:
        """The next answer; raises SystemExit where the process failed."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._process.args}: failed, see above")
        found: dict[str, float] = json.loads(line)
        return found

    def round(self) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write("round\n")
        self._process.stdin.flush()
        return self.answer()

    def __enter__(self) -> Checkout:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.versions", description=__doc__)
    parser.add_argument("--other", type=Path, required=True, help="root of the other checkout")
    parser.add_argument("--rounds", type=int, default=12, help="rounds of both checkouts (default: 12)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure (default: all)")
    parser.add_argument("--output", type=Path, help="JSON file of the results")
    options = parser.parse_args()
    machine = environment()
    times: dict[str, dict[str, list[float]]] = {"this": {}, "other": {}}
    with ExitStack() as stack:
        roots = {"this": ROOT, "other": options.other.resolve()}
        checkouts = {name: stack.enter_context(Checkout(root, options.parts)) for name, root in roots.items()}
        for checkout in checkouts.values():
            checkout.answer()
        for number in range(options.rounds):
            order = list(checkouts) if number % 2 == 0 else list(reversed(checkouts))
            for name in order:
                for what, seconds in checkouts[name].round().items():
                    times[name].setdefault(what, []).append(seconds)
            print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
    ratios: dict[str, Spread] = {what: ratio(times["this"][what], times["other"][what]) for what in times["this"]}
    rows = [
        (what, *(spread(times[name][what]).show("{:.4g}", 1e3) for name in checkouts), ratios[what].show("{:.3f}"))
        for what in times["this"]
    ]
    parts = [table(("median (quartiles)", "this, ms", "other, ms", "this / other"), rows)]
    print(markdown(parts))
    if options.output is not None:
        settings = {"rounds": options.rounds, "parts": options.parts, "other": _version(options.other)}
        save(options.output, settings, machine, times, parts)


def _version(root: Path) -> str:
    words = ["git", "describe", "--always", "--tags"]
    return subprocess.run(words, cwd=root, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    main()
