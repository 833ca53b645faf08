"""`RunView`: the page of a run that trains, and what of it has changed."""

import json
import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from markupsafe import Markup

from pipeloom.errors import InputError
from pipeloom.report.html import render, run_page
from pipeloom.report.run_files import read_metrics, read_timelines
from pipeloom.sim.timeline import Timeline
from pipeloom.watch.rank_states import RankState, read_states

_TIMELINES = "timelines.json"
_FILES = ("metrics.jsonl", _TIMELINES, "rewinds.json", "config.yaml", "environment.json")
_TEMPLATE = "watch.html.j2"


class RunView:
    """A run as its files and processes show it now. Reads only.

    Args:
        output_dir: of the run; it need not exist yet.
        seconds: between two looks of the page.
    """

    def __init__(self, output_dir: Path, seconds: float) -> None:
        self._directory, self._milliseconds = output_dir, round(1000 * seconds)
        self._rendered: tuple[str, str] = "", ""  # version, and what is inside of <main>
        self._timelines: tuple[str, dict[str, Timeline]] = "", {}  # version of the file, and its content

    def page(self, nonce: str) -> str:
        """The whole page. `nonce`: of its script, see Content-Security-Policy."""
        return self._page(self._version(), read_states(self._directory), nonce)

    def now(self, version: str) -> str:
        """JSON for a page of `version`: "main" (null: unchanged), "ranks", "state" in words, and "version"."""
        found, states = self._version(), read_states(self._directory)
        main = None
        if found != version:
            if found != self._rendered[0]:
                page = self._page(found, states, "")
                self._rendered = found, page.partition("<main>")[2].partition("</main>")[0]
            main = self._rendered[1]
        return json.dumps({"version": found, "main": main, "ranks": _ranks(states), "state": _words(states)})

    def _version(self) -> str:
        """Changes with every file of the run."""
        return "-".join(map(self._version_of, _FILES))

    def _version_of(self, name: str) -> str:
        try:
            status = (self._directory / name).stat()
        except OSError:
            return ""
        return f"{status.st_mtime_ns:x}.{status.st_size:x}"

    def _newest_timelines(self) -> dict[str, Timeline]:
        version = self._version_of(_TIMELINES)
        if version != self._timelines[0]:
            self._timelines = version, read_timelines(self._directory / _TIMELINES)
        return self._timelines[1]

    def _page(self, version: str, states: Sequence[RankState], nonce: str) -> str:
        own: dict[str, Any] = {
            "nonce": nonce,
            "version_now": version,
            "milliseconds": self._milliseconds,
            "ranks_now": Markup(_ranks(states)),
        }
        try:
            metrics = read_metrics(self._directory / "metrics.jsonl")
            whole = replace(metrics, truncated=False)  # the last line is being written
            return run_page(self._directory, whole, self._newest_timelines(), _TEMPLATE, waiting="", **own)
        except InputError as error:
            started = (self._directory / "metrics.jsonl").exists()
            waiting = str(error) if started else "The run has not finished a step yet."
            return render(_TEMPLATE, title=self._directory.resolve().name, lead="", waiting=waiting, **own)


def _ranks(states: Sequence[RankState]) -> str:
    return render("ranks.html.j2", states=states)


def _words(states: Sequence[RankState]) -> str:
    ended = sum(each.state == "ended" for each in states)
    if not states:
        return "live"
    if ended == len(states):
        return "the run has ended"
    return "live" if not ended else f"live; {ended} of {len(states)} processes have ended"


def new_secret() -> str:
    """A random text for addresses and scripts."""
    return secrets.token_urlsafe(18)
