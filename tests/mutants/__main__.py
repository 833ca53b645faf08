"""``python -m tests.mutants``: draw mutants, run the tests that execute their lines, list those that survive.

Works in clones of the last commit, so the working tree stays as it is. Needs the extra ``mutants``; takes tens of
minutes. Mutants that no test can notice are listed with the reason in ``tests/mutants/unnoticeable.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutants.cover import cached
from tests.mutants.draw import ROOMS, Mutant, draw

ROOT = Path(__file__).resolve().parents[2]
UNNOTICEABLE = Path(__file__).with_name("unnoticeable.json")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=300, help="mutants to draw (default: 300)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw (default: 0)")
    parser.add_argument("--rooms", nargs="+", default=list(ROOMS), help=f"folders of src (default: {' '.join(ROOMS)})")
    parser.add_argument("--workers", type=int, default=2, help="mutants tested at once (default: 2)")
    parser.add_argument("--seconds", type=float, default=240.0, help="longest time per mutant (default: 240)")
    parser.add_argument("--out", type=Path, default=ROOT / "build/mutants", help="folder of results")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="pipeloom-mutants-") as scratch:
        trees = [_clone(Path(scratch) / str(number)) for number in range(options.workers)]
        cover = cached(trees[0], options.out / "cover.json", options.workers)
        mutants = draw(trees[0], options.count, options.seed, tuple(options.rooms))
        free: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for tree in trees:
            free.put(tree)

        def judge(mutant: Mutant) -> dict[str, object]:
            tree = free.get()
            try:
                return _judge(tree, mutant, _tests_of(mutant, cover), options.seconds)
            finally:
                free.put(tree)

        results = []
        with ThreadPoolExecutor(options.workers) as pool:
            for number, result in enumerate(pool.map(judge, mutants), 1):
                results.append(result)
                print(f"{number}/{len(mutants)} {result['outcome']} {result['place']} {result['operator']}", flush=True)
    return _report(results, options.out)


def _clone(to: Path) -> Path:
    subprocess.run(["git", "clone", "--quiet", "--local", str(ROOT), str(to)], check=True)
    return to


def _tests_of(mutant: Mutant, cover: dict[str, tuple[float, dict[str, list[int]]]]) -> list[str]:
    """The test files that execute the mutant's line, the quickest first."""
    hits = [(seconds, file) for file, (seconds, lines) in cover.items() if mutant.line in lines.get(mutant.path, ())]
    return [file for _, file in sorted(hits)]


def _judge(tree: Path, mutant: Mutant, tests: list[str], seconds: float) -> dict[str, object]:
    path = tree / mutant.path
    text = path.read_text(encoding="utf-8")
    changed = mutant.source(text)
    assert changed is not None, mutant
    diff = list(difflib.unified_diff(text.splitlines(), changed.splitlines(), lineterm="", n=0))[3:]
    result: dict[str, object] = {
        "place": f"{mutant.path}:{mutant.line}",
        "operator": mutant.operator.removeprefix("core/"),
        "diff": diff,
        "tests": tests,
    }
    if not tests:
        return {**result, "outcome": "not executed"}
    try:
        path.write_text(changed, encoding="utf-8")
        return {**result, "outcome": _run(tree, tests, seconds)}
    finally:
        path.write_text(text, encoding="utf-8")


def _run(tree: Path, tests: list[str], seconds: float) -> str:
    """What becomes of the mutant in `tree`: killed, hung (killed by the time limit), or survived."""
    words = [sys.executable, "-B", "-m", "pytest", "-q", "-x", "--timeout=90", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        words, cwd=tree, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        return "killed" if process.wait(seconds) else "survived"
    except subprocess.TimeoutExpired:
        return "out of time"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _report(results: list[dict[str, object]], out: Path) -> int:
    reasons = json.loads(UNNOTICEABLE.read_text(encoding="utf-8")) if UNNOTICEABLE.is_file() else {}
    (out / "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    killed = sum(result["outcome"] == "killed" for result in results)
    print(f"{killed} of {len(results)} mutants killed ({killed / max(len(results), 1):.1%})")
    unexplained = 0
    for result in results:
        if result["outcome"] != "killed":
            lines = [str(line) for line in result["diff"]]  # type: ignore[attr-defined]
            reason = reasons.get("\n".join(line.strip() for line in lines))
            unexplained += reason is None
            print(f"\n{result['outcome']}: {result['place']}{f' ({reason})' if reason else ''}")
            print("\n".join(f"  {line}" for line in lines))
    print(f"\n{unexplained} survivors without a reason")
    return 0


if __name__ == "__main__":
    sys.exit(main())
