"""``python -m tests.audit``: looks the versions in constraints.txt up in a database of known vulnerabilities.

Runs ``pip-audit`` of the extra ``audit``; further arguments are passed on to it, such as ``--ignore-vuln ID``. Exit
code 1 if a version has a known vulnerability. Without a network or without pip-audit it says that it is skipped, and
ends with 0: what can be checked must not depend on where it is checked.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

CONSTRAINTS = Path(__file__).resolve().parents[1] / "constraints.txt"
_COMMAND = ("--no-deps", "--disable-pip", "--progress-spinner=off", "--format=json", "--desc=off")
_OFFLINE = ("ConnectionError", "ProxyError", "ConnectTimeout", "ReadTimeout", "Max retries exceeded", "ServiceError")


def judged(output: str, errors: str) -> tuple[int, list[str]]:
    """The exit code and the lines to show, from what pip-audit printed."""
    try:
        rows = json.loads(output)["dependencies"]
    except (ValueError, KeyError, TypeError):
        last = errors.strip().splitlines()[-1:] or ["no message"]
        if any(word in errors for word in _OFFLINE):
            return 0, [f"make audit: SKIPPED, the database of vulnerabilities cannot be reached: {last[0][:200]}"]
        return 1, [f"make audit: pip-audit failed: {last[0][:200]}"]
    lines = [
        f"{row['name']} {row['version']}: {each['id']} {' '.join(each['aliases'])}, fixed in "
        f"{' '.join(each['fix_versions']) or 'no release'}"
        for row in rows
        for each in row.get("vulns", ())
    ]
    skipped = [f"{row['name']}: not audited: {row['skip_reason']}" for row in rows if "skip_reason" in row]
    if lines:
        lines.append(f"make audit: known vulnerabilities: {len(lines)}. Raise the versions in constraints.txt.")
        return 1, [*skipped, *lines]
    return 0, [*skipped, f"make audit: no known vulnerability; audited: {len(rows) - len(skipped)}"]


def main(more: Sequence[str]) -> int:
    """Run pip-audit, and print what it found; returns the exit code."""
    if importlib.util.find_spec("pip_audit") is None:
        print("make audit: SKIPPED, pip-audit is not installed: this machine may have no network.")
        return 0
    command = [sys.executable, "-m", "pip_audit", f"--requirement={CONSTRAINTS}", *_COMMAND, *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    code, lines = judged(done.stdout, done.stderr)
    print("\n".join(lines))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
