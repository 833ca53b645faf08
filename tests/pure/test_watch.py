"""`pipeloom watch`: the report so far and what processes do; it follows changes, and opens to nobody else."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from pipeloom.cli import main
from pipeloom.common import process_place
from pipeloom.common.process_place import place_of, write_places
from pipeloom.processes.black_box import BlackBox
from pipeloom.watch.rank_states import read_states
from pipeloom.watch.run_view import RunView
from pipeloom.watch.server import served
from tests import browser

from .test_reports import METRICS, add_timelines, run_directory


def get(address: str, path: str = "/", method: str = "GET", **headers: str) -> tuple[int, str, dict[str, str]]:
    parts = urlsplit(address)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), dict(answer.headers)
    finally:
        connection.close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    directory = run_directory(tmp_path / "my-run", METRICS[:5])
    add_timelines(directory)
    return directory


@pytest.fixture
def address(run: Path) -> Iterator[str]:
    with served(RunView(run, 0.1), 0) as address:
        yield address


def test_the_page_is_the_report_so_far(run: Path, address: str) -> None:
    token = urlsplit(address).query
    status, page, headers = get(address, f"/?{token}")
    assert status == 200
    assert "steps 1 to 5" in page
    assert page.count("<svg") >= 3
    assert headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert f"'nonce-{re.search('nonce=.([^ ]*).>', page)[1]}'" in headers["Content-Security-Policy"]
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", page)
    version = json.loads(get(address, f"/now?{token}&version=")[1])["version"]
    assert json.loads(get(address, f"/now?{token}&version={version}")[1])["main"] is None
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(METRICS[5]) + '\n{"step": 7, "lo')  # a line being written
    now = json.loads(get(address, f"/now?{token}&version={version}")[1])
    assert now["version"] != version
    assert "steps 1 to 6" in now["main"]
    assert "incomplete" not in now["main"]


def test_nobody_else_reads_it(address: str) -> None:
    token = urlsplit(address).query
    assert urlsplit(address).hostname == "127.0.0.1"
    for path in ("/", "/?token=x", "/now", "/now?token=", "/?tokens=1"):
        status, text, _ = get(address, path)
        assert (status, text) == (403, "The address needs the token that `pipeloom watch` printed.")
    port = urlsplit(address).port
    for host in ("evil.example", f"evil.example:{port}", "evil.example:8765", ""):
        assert get(address, f"/?{token}", Host=host)[0] == 403
    for host in ("127.0.0.1", f"localhost:{port}"):
        assert get(address, f"/?{token}", Host=host)[0] == 200
    assert get(address, f"/../config.yaml?{token}")[0] == 404
    for method in ("POST", "PUT", "DELETE"):
        assert get(address, f"/?{token}", method)[0] == 501


def test_a_run_without_steps_and_one_with_a_damaged_file(tmp_path: Path) -> None:
    view = RunView(tmp_path, 1.0)
    assert "has not finished a step yet" in view.page("n")
    (tmp_path / "metrics.jsonl").write_text('nonsense\n{"step": 1}\n')
    assert "line 1: must be a JSON object with a step" in view.page("n")


def test_states_of_processes_are_seen(tmp_path: Path) -> None:
    """A running rank, a stopped one, one that has ended, one of another host, and a file that is damaged."""
    assert read_states(tmp_path) == []
    box = BlackBox()
    box.enter("step 12", patient=False)
    box.page[:4] = b"1B3\0"
    script = (
        "import json, sys, time; from pipeloom.processes.black_box import BlackBox;"
        "from pipeloom.common.process_place import place_of; box = BlackBox(); box.enter('step 3', patient=False);"
        "print(json.dumps(place_of(sys.argv[1], box.descriptor)), flush=True); sys.stdin.read()"
    )
    others = [
        subprocess.Popen([sys.executable, "-c", script, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for name in ("rank 1", "rank 2")
    ]
    try:
        places = [place_of("rank 0", box.descriptor), *(json.loads(other.stdout.readline()) for other in others)]
        others[0].send_signal(signal.SIGSTOP)
        os.waitpid(others[0].pid, os.WUNTRACED)
        others[1].communicate()
        write_places(tmp_path, [*places, {**places[0], "name": "rank 3", "host": "far/1/2"}])
        first, stopped, ended, far = read_states(tmp_path)
        assert first[:4] == ("rank 0", "running", "step 12", "1B3")
        assert first.seconds >= 0
        assert stopped[:3] == ("rank 1", "stopped", "step 3")
        assert ended == ("rank 2", "ended", "", "", None)
        assert far[:2] == ("rank 3", "on far: not seen from here")
        page = RunView(tmp_path, 1.0).page("n")
        assert all(word in page for word in ("step 12", "1B3", "stopped", "on far"))
    finally:
        for other in others:
            other.kill()
            other.communicate()
    (tmp_path / "processes.json").write_text('[{"host": 3}]')
    assert read_states(tmp_path) == []


def test_a_place_needs_no_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_place, "stat_fields", lambda process: [])
    place = place_of("rank 0", 5)
    assert (place["process"], place["started"], place["box"]) == (os.getpid(), "", 5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none"], "none is not a directory. Pass the --output_dir of `pipeloom train`"),
        ([".", "--port", "70000"], "--port 70000: must be from 0 to 65535"),
        ([".", "--seconds", "0"], "--seconds 0: must be from 0.1 to 3600"),
    ],
)
def test_bad_options_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_port_that_is_taken(address: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    port = urlsplit(address).port
    assert main(["watch", str(run), "--port", str(port)]) == 2
    assert f"--port {port}: Address already in use. Choose another port" in capsys.readouterr().err


@pytest.mark.skipif(browser.PATH is None, reason="no Chromium on this machine")
def test_a_browser_shows_it_and_follows_the_run(run: Path, address: str) -> None:
    write_places(run, [place_of("rank 0", BlackBox().descriptor)])
    with browser.Page() as page:
        page.call("Page.navigate", url=address)
        page.until("document.readyState == 'complete' && document.getElementById('ranks')")
        assert page.value("document.querySelectorAll('svg path').length") > 3
        assert page.value(
            "[...document.querySelectorAll('svg')].every(each => each.getBoundingClientRect().height > 20)"
        )
        page.until("document.getElementById('live').textContent.startsWith('live, seen at')")
        page.press("Tab", 9)
        assert page.value("document.activeElement.className").startswith("scroll")
        heading = "document.activeElement.closest('section').querySelector('h2').textContent"
        focused = page.value(heading)
        slow = {"replica": 0, "rank": 1, "kind": "forwards", "factor": 2.1, "share": 0.17}
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({**METRICS[5], "stragglers": [slow]}) + "\n")
        page.until("document.querySelector('.lead').textContent.includes('steps 1 to 6')")
        assert page.value(heading) == focused  # where it was before the change, which added a table
        assert "computing: forwards" in page.value("document.querySelector('main').innerText")
        page.call("Emulation.setDeviceMetricsOverride", width=360, height=700, deviceScaleFactor=1, mobile=False)
        assert page.value("document.documentElement.scrollWidth <= innerWidth")
        assert page.complaints == []
    with browser.Page() as page:
        page.call("Page.navigate", url=address.replace("token=", "token=x"))
        page.until("document.readyState == 'complete' && document.body")
        assert "needs the token" in page.value("document.body.innerText")


@pytest.mark.skipif(browser.PATH is None, reason="no Chromium on this machine")
def test_a_page_that_lost_its_server_says_so(run: Path) -> None:
    with browser.Page() as page:
        with served(RunView(run, 0.1), 0) as address:
            page.call("Page.navigate", url=address)
            page.until("document.getElementById('live')?.textContent.startsWith('live, seen at')")
        page.until("document.getElementById('live').textContent.startsWith('pipeloom watch has ended')")
        assert page.value("document.querySelectorAll('svg').length") > 3
