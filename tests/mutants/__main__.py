"""``python -m tests.mutants``: draw mutants, run the tests that execute their lines, list those that survive.

Works in clones of the last commit, so the working tree stays as it is. Needs the extra ``mutants`` and an hour or two.
Records and results are kept in ``build/mutants``, by state of code and tests: an interrupted run goes on there.
A mutant is killed when a test fails, the interpreter ends, or a test takes several times as long as on the unchanged
code. Mutants that no test can notice are listed with the reason in ``tests/mutants/unnoticeable.json``.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.mutants.cover import Cover, choose, recorded
from tests.mutants.draw import ROOMS, Mutant, draw
from tests.mutants.plugin import CHOSEN, LOG

ROOT = Path(__file__).resolve().parents[2]
UNNOTICEABLE = Path(__file__).with_name("unnoticeable.json")
_KILLED = ("killed", "timed out")
_LONGER = 3.0  # a test that takes this many times its recorded time, and the seconds below, hangs
_START_SECONDS = 30.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=300, help="mutants to draw (default: 300)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw (default: 0)")
    parser.add_argument("--rooms", nargs="+", default=list(ROOMS), help=f"folders of src (default: {' '.join(ROOMS)})")
    parser.add_argument("--workers", type=int, default=2, help="mutants tested at once (default: 2)")
    parser.add_argument("--seconds", type=float, default=75.0, help="recorded time of tests per mutant (default: 75)")
    parser.add_argument("--out", type=Path, default=ROOT / "build/mutants", help="folder of records and results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pipeloom-mutants-") as scratch:
        trees = [_clone(Path(scratch) / str(number)) for number in range(options.workers)]
        folder = options.out.resolve() / _commit(trees[0])
        cover = recorded(trees[0], folder, options.workers)
        mutants = draw(trees[0], options.count, options.seed, tuple(options.rooms))
        file = folder / "results.jsonl"
        kept = _results(file)
        remaining = iter([mutant for mutant in mutants if mutant.name not in kept])

        def work(tree: Path) -> None:
            for mutant in remaining:
                result = _judge(tree, mutant, cover, options.seconds)
                with file.open("a", encoding="utf-8") as out:
                    out.write(json.dumps(result) + "\n")
                print(f"{result['outcome']}: {mutant.name}", flush=True)

        with ThreadPoolExecutor(options.workers) as pool:
            list(pool.map(work, trees))
        results = _results(file)
    return _report([results[mutant.name] for mutant in mutants])


def _clone(to: Path) -> Path:
    quiet = ["-c", "advice.detachedHead=false", "clone", "--quiet", "--local"]
    subprocess.run(["git", *quiet, str(ROOT), str(to)], check=True)
    # A mutant may be as long and as old as the code that it changes: only hashes tell which one was compiled.
    compiled = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode=checked-hash", "src"]
    subprocess.run(compiled, cwd=to, check=True)
    return to


def _commit(tree: Path) -> str:
    """Digest of the committed code and tests."""
    words = ["git", "rev-parse", "HEAD:src", "HEAD:tests/pure", "HEAD:tests/cpu"]
    trees = subprocess.run(words, cwd=tree, capture_output=True, check=True).stdout
    return hashlib.sha256(trees).hexdigest()[:12]


def _results(file: Path) -> dict[str, dict[str, Any]]:
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return {result["name"]: result for result in map(json.loads, lines)}


def _judge(tree: Path, mutant: Mutant, cover: Cover, seconds: float) -> dict[str, Any]:
    path = tree / mutant.path
    text = path.read_text(encoding="utf-8")
    changed = mutant.source(text)
    assert changed is not None, mutant
    diff = list(difflib.unified_diff(text.splitlines(), changed.splitlines(), lineterm="", n=0))[3:]
    tests = choose(
        cover.tests_of(mutant.path, range(mutant.statement[0], max(mutant.line, mutant.statement[1]) + 1)),
        cover.seconds,
        seconds,
    )
    result = {"name": mutant.name, "diff": diff, "tests": len(tests)}
    if not tests:
        return {**result, "outcome": "not executed"}
    try:
        path.write_text(changed, encoding="utf-8")
        return {**result, **_run(tree, {test: cover.seconds[test] for test in tests})}
    finally:
        path.write_text(text, encoding="utf-8")


def _run(tree: Path, seconds: dict[str, float]) -> dict[str, Any]:
    """What the tests make of the mutant in `tree`, and the test that fails first with its message."""
    chosen, log = tree.with_suffix(".tests"), tree.with_suffix(".log")
    chosen.write_text(json.dumps({test: _START_SECONDS + _LONGER * spent for test, spent in seconds.items()}))
    log.write_text("")
    words = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "tests.mutants.plugin", "-p", "no:cacheprovider"]
    words += [f"--basetemp={tree.with_suffix('.tmp')}", *sorted({test.partition("::")[0] for test in seconds})]
    process = subprocess.Popen(
        words,
        cwd=tree,
        env={**os.environ, "PYTHONPATH": f"{tree}/src:{tree}", LOG: str(log), CHOSEN: str(chosen)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        code = process.wait(2 * _START_SECONDS + _LONGER * sum(seconds.values()))
    except subprocess.TimeoutExpired:
        return {"outcome": "timed out"}
    finally:
        _end_session(process.pid)
        process.wait()
    reports = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    failed = next((report for report in reports if report["outcome"] == "failed"), {"test": "", "message": ""})
    # 3, 4 and 5 are pytest's codes for errors of its own and for tests that are not there.
    outcome = {0: "survived", 3: "error", 4: "error", 5: "error"}.get(code, "killed")
    if failed["message"].startswith("Failed: Timeout"):
        outcome = "timed out"
    return {"outcome": outcome, "by": failed["test"], "message": failed["message"]}


def _end_session(session: int) -> None:
    """End what a run of tests left: launchers put their ranks into process groups of their own."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(ProcessLookupError):
                if os.getsid(int(entry.name)) == session:
                    os.kill(int(entry.name), signal.SIGKILL)


def _report(results: list[dict[str, Any]]) -> int:
    reasons = json.loads(UNNOTICEABLE.read_text(encoding="utf-8")) if UNNOTICEABLE.is_file() else {}
    unexplained = 0
    for result in results:
        if result["outcome"] not in _KILLED:
            reason = reasons.get("\n".join(line.strip() for line in result["diff"]))
            unexplained += reason is None
            print(f"\n{result['outcome']}: {result['name']}{f' ({reason})' if reason else ''}")
            print("\n".join(f"  {line}" for line in result["diff"]))
    outcomes = Counter(result["outcome"] for result in results)
    killed = sum(outcomes[outcome] for outcome in _KILLED)
    print(f"\n{killed} of {len(results)} mutants killed ({killed / max(len(results), 1):.1%}): {dict(outcomes)}")
    print(f"{unexplained} survivors without a reason")
    return 0


if __name__ == "__main__":
    sys.exit(main())
