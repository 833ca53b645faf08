"""Every reader of files answers damaged input with one line of a PipeloomError that names the file, or reads it.

`tests/pure/readers.py` lists the readers. `tests/pure/corpus/READER/` has files for each: ``valid*`` must be read,
``refused-*`` must be refused, and the others may be either; most of these once raised another error. Mutations of the
valid files follow, few in each run, and many with ``-m whole_grid``.
"""

from __future__ import annotations

import ast
import gzip
import json
import re
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch  # noqa: F401  # before the limit of memory
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pipeloom
from pipeloom.data import shards
from tests.pure.readers import CORPUS, READERS, answer, valid_files

ROOT = Path(pipeloom.__file__).parent
MOST_SECONDS = 4.0  # of a processor, for a file of a few kilobytes
MOST_BYTES = 1 << 30  # of address space
DEEP = [b"[" * 100_000, b'{"":' * 100_000, b"[" * 900 + b"]" * 900, b"- " * 100_000, b"{a: " * 50_000]
EVERYWHERE = {
    "empty": b"",
    "NULs": bytes(64),
    "ones": b"\xff" * 64,
    "a pickle": b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x08builtins\x94.",
    "a line break": b"\n",
    "null": b"null",
    "a string": b'"x"',
    "a number of 5,000 digits": b"9" * 5000,
    "an infinite number": b"1e999",
    "a header of 2 ** 63 bytes": (1 << 63).to_bytes(8, "little") + b"{}",
    **{f"nested without end: {deep[:4].decode()}": deep for deep in DEEP},
}


@contextmanager
def bounded(most_bytes: int = MOST_BYTES) -> Iterator[None]:
    """Fails what takes much longer, or allocates much more memory, than the files here need."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    began = time.process_time()
    resource.setrlimit(resource.RLIMIT_AS, (size + most_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert time.process_time() - began < MOST_SECONDS


def refusal(name: str, content: bytes) -> str | None:
    """The error of a reader, which is one line and names the file."""
    reader = READERS[name]
    with bounded():
        said = answer(reader, content)
    if said is not None:
        assert said.strip()
        assert "\n" not in said
        named = (reader.file, "/run", "/checkpoint-3", *([".safetensors"] if reader.around else []))  # or one beside it
        assert not reader.names_file or any(name in said for name in named), said
    return said


@pytest.mark.parametrize("name", READERS)
def test_the_corpus_is_read_or_refused_as_its_names_say(name: str) -> None:
    assert valid_files(name)
    for content in valid_files(name):
        assert refusal(name, content) is None
        refusal(name, content[: len(content) // 2])
        refusal(name, content[:-1])
    for file in sorted((CORPUS / name).glob("*")):
        said = refusal(name, file.read_bytes())
        assert (said is not None) >= file.name.startswith("refused-"), file


@pytest.mark.parametrize("name", READERS)
def test_what_is_no_file_of_any_reader_is_refused(name: str) -> None:
    for kind, content in EVERYWHERE.items():
        said = refusal(name, content)
        assert said is not None or not READERS[name].refuses or not kind.startswith("nested"), kind


def test_the_corpus_has_only_files_of_readers() -> None:
    assert {path.name for path in CORPUS.iterdir()} <= {*READERS, "checkpoint-3"}


# Mutations

VALUES: list[Any] = [
    *(None, True, False, -1, 0, 1, 2, 7, 1.5, -0.0, 1e308, float("nan"), float("inf"), float("-inf")),
    *(10**6, 10**9, 1 << 31, 1 << 63, 1 << 64, 10**30, 10**400),
    *("", "x", "0F0", "a\nb", "\0", "\ud800", "..", "/", "x" * 300, "1e9", "NaN"),
    *([], {}, [[]], [None], [0, 1], {"a": 1}, {"": None}),
]
KEYS = ["x", "", "a\nb", "\0", "__metadata__"]
PIECES = [
    *(b"null", b"-1", b"1e999", b"9" * 5000, b'""', b"[]", b"{}", b"\\ud800", b"\0", b"\xef\xbb\xbf", b"\xff", b","),
    *(b":", b"\n", b"\r", b"\t", b'"', b"0F9", b"NaN", b"1000000000", b"[" * 3000, b"&a [*a]", b"!!python/object:a.b"),
]


@st.composite
def damaged(draw: st.DrawFn, files: list[bytes]) -> bytes:
    """One of the files with one or two mutations."""
    content = draw(st.sampled_from(files))
    for _ in range(draw(st.integers(1, 2))):
        content = _rewritten(draw, content) if draw(st.booleans()) else _cut_or_flipped(draw, content)
    return content


def _cut_or_flipped(draw: st.DrawFn, content: bytes) -> bytes:
    first = draw(st.integers(0, len(content)))
    last = draw(st.integers(first, min(len(content), first + 9)))
    match draw(st.sampled_from(("flip", "cut", "replace", "remove", "repeat"))):
        case "flip" if first < len(content):
            flipped = content[first] ^ 1 << draw(st.integers(0, 7))
            return content[:first] + bytes([flipped]) + content[first + 1 :]
        case "cut":
            return content[:first]
        case "remove":
            return content[:first] + content[last:]
        case "repeat":
            return content[:first] + content[first : first + 40] + content[first:]
    return content[:first] + draw(st.sampled_from(PIECES) | st.binary(max_size=3)) + content[last:]


def _rewritten(draw: st.DrawFn, content: bytes) -> bytes:
    """A file with another value in its JSON: all of it, one of its lines, a header, or compressed."""
    with suppress(OSError, EOFError):
        if content.startswith(b"\x1f\x8b"):
            return gzip.compress(_rewritten(draw, gzip.decompress(content)), mtime=0)
    length = int.from_bytes(content[:8], "little")
    if content[8:9] == b"{" and length <= len(content) - 8:
        header = _with_another_value(draw, content[8 : 8 + length])
        return len(header).to_bytes(8, "little") + header + content[8 + length :]
    lines = [content] if _is_json(content) else content.splitlines(keepends=True)
    if not lines:
        return content
    place = draw(st.integers(0, len(lines) - 1))
    lines[place] = _with_another_value(draw, lines[place].rstrip()) + lines[place][len(lines[place].rstrip()) :]
    return b"".join(lines)


def _is_json(content: bytes) -> bool:
    try:
        json.loads(content)
    except ValueError:
        return False
    return True


def _with_another_value(draw: st.DrawFn, text: bytes) -> bytes:
    return json.dumps(_changed(draw, json.loads(text))).encode() if _is_json(text) else _cut_or_flipped(draw, text)


def _changed(draw: st.DrawFn, value: Any) -> Any:
    """JSON with another value, with one key more or less, or with a member twice, at one place."""
    if not isinstance(value, dict | list) or not value or draw(st.integers(0, 5)) == 0:
        return draw(st.sampled_from(VALUES))
    keys = [*value] if isinstance(value, dict) else [*range(len(value))]
    key = draw(st.sampled_from(keys))
    copy = value.copy()
    match draw(st.integers(0, 7)):
        case 0:
            del copy[key]
        case 1 if isinstance(copy, list):
            copy.append(copy[key])
        case 1:
            copy[draw(st.sampled_from([*KEYS, *keys]))] = draw(st.sampled_from([copy[key], *VALUES]))
        case _:
            copy[key] = _changed(draw, value[key])
    return copy


FEW = settings(max_examples=12, deadline=None, derandomize=True, database=None, suppress_health_check=[*HealthCheck])
MANY = settings(FEW, max_examples=1000, derandomize=False)


def _fuzz(name: str, data: st.DataObject) -> None:
    refusal(name, data.draw(damaged(valid_files(name))))


@pytest.mark.parametrize("name", READERS)
@FEW
@given(data=st.data())
def test_a_damaged_file_is_read_or_refused_in_one_line(name: str, data: st.DataObject) -> None:
    _fuzz(name, data)


@pytest.mark.whole_grid
@pytest.mark.parametrize("name", READERS)
@MANY
@given(data=st.data())
def test_many_damaged_files_are_read_or_refused_in_one_line(name: str, data: st.DataObject) -> None:
    _fuzz(name, data)


# Small files that stand for large content


def test_a_compressed_line_that_no_memory_holds_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_LONGEST_LINE", 1 << 20)
    file = tmp_path / "d.jsonl.gz"
    file.write_bytes(gzip.compress(b'{"text": "a"}\n{"text": "' + b"x" * (1 << 21)))
    with pytest.raises(
        pipeloom.errors.DataError, match=r"d\.jsonl\.gz line 2 has more than 1,048,576 bytes\. Split it"
    ):
        list(shards.read_lines(file))


def test_a_compressed_text_is_not_held_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"line {number}\n" for number in range(400_000))
    file = tmp_path / "d.txt.gz"
    file.write_bytes(gzip.compress(text.encode()))
    read = shards.read_texts(shards.Shard.of(file, tmp_path), "text")
    assert "".join(piece.text for piece in read if piece) == text
    monkeypatch.setattr(shards, "_LARGE", 1 << 20)
    opened = []
    monkeypatch.setattr(shards, "opened", lambda path, real=shards.opened: opened.append(path) or real(path))
    pieces = list(shards.read_texts(shards.Shard("x", "d.txt.gz", 0, 0)._replace(path=str(file)), "text"))
    assert "".join(piece.text for piece in pieces if piece) == text
    assert len(opened) == 2  # read twice, rather than held


def test_a_small_zstandard_file_is_decompressed_in_small_parts(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    file = tmp_path / "d.txt.zst"
    file.write_bytes(zstandard.compress(bytes(1 << 28)))
    with bounded(1 << 27):
        assert list(shards.read_texts(shards.Shard.of(file, tmp_path), "text")) == [None]


# What reads files

KERNEL = {  # of /proc and /sys
    *("chaos/leftovers.py", "cli/doctor.py", "common/process_place.py", "processes/collectives.py"),
    *("processes/network/arrivals.py", "processes/rendezvous.py", "train/config/validate.py"),
    *("processes/launching/torchrun.py", "transport/shared_memory.py"),
}
BETWEEN_PROCESSES = {  # of one run, of one command, or of a campaign and its runs
    *("chaos/attempt.py", "chaos/fault.py", "data/tokenizing.py", "data/worker.py", "integrations/ray/workers.py"),
    *("plan/plan.py", "processes/agreement.py", "processes/hang_board.py", "processes/hang_report.py"),
    *("processes/launching/fork_server.py", "processes/recovery/lifeline.py", "split/planned/tracking/forms.py"),
    *("train/config/train_config.py", "train/elastic/entry.py", "train/machine/__main__.py"),
    *("train/machine/collective_times.py", "train/machine/measure.py", "train/process_group.py"),
    *("train/recovery/state_copies.py", "train/recovery/step_agreement.py", "training/fastest_plan.py"),
    "transport/values.py",
}
BY_TRANSFORMERS = {"data/pretrained_tokenizer.py"}
NOT_DECODED = {  # memory and files of this process, or bytes that are copied or compared
    *("chaos/flip.py", "parallel/offload/store.py", "processes/black_box.py", "train/data/written.py"),
    *("train/resharding.py", "transport/shared_block.py"),
}
_CALLS = {
    *("parse_json", "parse_file", "read_json", "load_json", "read_text", "read_bytes", "memmap", "mmap", "safe_open"),
    *("GzipFile", "ParquetFile", "from_str", "fromfile"),
}
_MAY_READ = re.compile(rf"\b(?:{'|'.join(_CALLS)}|open|(?:json|yaml)\.(?:loads?|parse))\(")


def reads(tree: ast.AST) -> bool:
    """Whether a module calls what reads files or decodes what is in them."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        of = getattr(getattr(node.func, "value", None), "id", "")
        if name in ("loads", "load", "parse"):
            if of in ("json", "yaml"):
                return True
        elif name in _CALLS:
            return True
        elif name == "open":
            modes = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            if any("r" in mode for mode in modes) or (isinstance(node.func, ast.Name) and len(node.args) == 1):
                return True
    return False


def test_every_module_that_reads_files_is_listed() -> None:
    """A new reader needs an entry in `READERS` with files in the corpus, or it reads no file of others."""
    texts = {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in ROOT.rglob("*.py")}
    found = {name for name, text in texts.items() if _MAY_READ.search(text) and reads(ast.parse(text))}
    fuzzed = {module for reader in READERS.values() for module in reader.modules}
    listed = fuzzed | KERNEL | BETWEEN_PROCESSES | BY_TRANSFORMERS | NOT_DECODED
    assert sorted(found - listed) == []
    assert sorted(listed - found) == []
