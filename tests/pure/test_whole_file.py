"""Output files are whole: what was there before, or what is meant to be there."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipeloom.cli import main
from pipeloom.common.atomic_file import check_named, whole_file, write_whole
from pipeloom.errors import InputError, RunError
from pipeloom.processes.host_memory import telling_of_memory
from pipeloom.processes.launching.ranks import anonymous_file
from pipeloom.processes.recovery.notes import Notes


@contextmanager
def no_file_above(size: int) -> Iterator[None]:
    """As on a full disk, writes beyond so many bytes of a file fail."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_is_replaced_and_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 250)
    write_whole(path, "one")
    plain = tmp_path / "plain"
    plain.write_text("")
    assert path.stat().st_mode == plain.stat().st_mode
    path.chmod(0o640)
    write_whole(path, b"two")
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("two", 0o640)
    assert sorted(os.listdir(tmp_path)) == sorted([path.name, "plain"])


def test_a_write_that_fails_leaves_the_file_that_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")
    with no_file_above(1000), pytest.raises(OSError, match="File too large") as caught:
        write_whole(path, "x" * 2000)
    assert caught.value.filename == str(path)
    with pytest.raises(TypeError), whole_file(path) as file:
        file.writelines([b"half", None])  # type: ignore[list-item]
    with pytest.raises(FileNotFoundError, match="elsewhere"), whole_file(path) as file:
        (tmp_path / "elsewhere").read_bytes()
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["file"]


def test_until_the_end_others_see_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")
    with whole_file(path) as file:
        file.write(b"x" * (1 << 20))
        assert path.read_text() == "before"
    assert path.stat().st_size == 1 << 20


def test_links_pipes_and_devices_are_written_as_they_are(tmp_path: Path) -> None:
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    (tmp_path / "target").write_text("much longer than what comes")
    link.symlink_to("target")
    write_whole(link, "through")
    assert link.is_symlink()
    assert (tmp_path / "target").read_text() == "through"
    os.mkfifo(pipe)
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.append(pipe.read_text()), daemon=True)
    reader.start()
    write_whole(pipe, "piped")
    reader.join()
    assert found == ["piped"]
    write_whole(Path("/dev/null"), "nothing")
    assert not Path("/dev/null").is_file()
    with pytest.raises(IsADirectoryError):
        write_whole(tmp_path, "")


def test_a_picture_goes_to_standard_output(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pipeloom", "simulate", "1f1b", "--ranks=2", "--microbatches=2"]
    with (tmp_path / "out").open("w") as out:
        done = subprocess.run([*command, "--json", "--svg=/dev/stdout"], stdout=out, check=False, timeout=300)
    assert done.returncode == 0
    assert "</svg>" in (tmp_path / "out").read_text()
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("kind", ["csv", "html", "svg", "trace"])
def test_files_of_simulate_are_whole(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / f"file.{'json' if kind == 'trace' else kind}"
    words = ["simulate", "1f1b", "--ranks=4", "--json", f"--{kind}={path}"]
    assert main([*words, "--microbatches=8"]) == 0
    before = path.read_bytes()
    capsys.readouterr()
    with no_file_above(100):
        assert main([*words, "--microbatches=16"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (f"pipeloom: error: --{kind} {path}: File too large. Use a writable path.\n")
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == [path.name]


def test_the_files_of_a_report_are_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 2.0}) + "\n")
    assert main(["report", str(tmp_path)]) == 0
    before = (tmp_path / "report.html").read_bytes()
    capsys.readouterr()
    with no_file_above(1000):
        assert main(["report", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"pipeloom: error: {tmp_path / 'report.html'}: File too large. ")
    assert error.count("\n") == 1
    assert (tmp_path / "report.html").read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["metrics.jsonl", "report.html"]


def test_memory_counts_as_a_file_for_the_limit() -> None:
    memory, limit = (
        os.memfd_create("memory"),
        r"bytes of memory cannot be had \(File too large\)\. .*: raise `ulimit -f`\.$",
    )
    with no_file_above(1000):
        with pytest.raises(RunError, match=rf"notes for --recover: 67,\d+,\d+ {limit}"):
            Notes(memory).write(1, 5, b"content")
        with (
            pytest.raises(RunError, match=f"black-box-0 of the launcher: 5,000 {limit}"),
            anonymous_file("black-box-0", 5000),
        ):
            pass
    full = OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    with (
        pytest.raises(RunError, match=r"copies: 7 .* \(Cannot allocate memory\)\. Free memory\.$"),
        telling_of_memory("copies", 7),
    ):
        raise full
    os.close(memory)


def test_named_files_are_checked_before_the_work(tmp_path: Path) -> None:
    here = str(tmp_path / "a.json")
    check_named({"--out": here, "--html": None, "--svg": "/dev/null", "--trace": "/dev/null"})
    for second, said in (
        (str(tmp_path / "." / "a.json"), f"--html {tmp_path}/a.json: is the file of --out too. Use another path."),
        (str(tmp_path), f"--html {tmp_path}: is a directory. Use the path of a file."),
        (f"{tmp_path}/none/b", f"--html {tmp_path}/none/b: directory {tmp_path}/none does not exist. Make it, or use "),
    ):
        with pytest.raises(InputError) as error:
            check_named({"--out": here, "--html": second})
        assert str(error.value).startswith(said)
