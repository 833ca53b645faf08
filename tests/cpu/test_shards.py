"""Training data at scale: shards of every kind, tokenized once by several processes, mixed, and never out of order."""

from __future__ import annotations

import errno
import gzip
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from fsspec.spec import AbstractBufferedFile
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.common.division import even_parts
from pipeloom.common.quantities import bytes_text
from pipeloom.data import Corpus, MixedCorpus, Mixture, Sampler, prepare_corpus
from pipeloom.data import parts as parts_file
from pipeloom.data import tokenizing as tokenizing_file
from pipeloom.data.files import weighted_paths
from pipeloom.data.opened import opened
from pipeloom.data.shards import kind_of, pieces_of, read_texts
from pipeloom.errors import DataError
from pipeloom.train.config.schedule import samples_of_replica
from tests.cpu.train_runs import local


def documents(first: int, last: int) -> list[str]:
    return [f"document {number} é \N{GRINNING FACE}{'x' * (number % 11)}" for number in range(first, last)]


def lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"id": 7, "text": text}) + "\n" for text in texts).encode()


def texts_of(corpus: Corpus) -> list[str]:
    """All documents, of training and validation."""
    whole = bytes(corpus.train[:]) + bytes(corpus.validation[:])
    assert whole.endswith(b"\0")
    return sorted(whole.decode().split("\0")[:-1])


def in_cache(cache: Path) -> set[str]:
    return {file.name for file in cache.iterdir()}


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Thirty documents in shards of each kind that needs no other library, and shards without any."""
    home = tmp_path / "shards"
    home.mkdir()
    (home / "a.jsonl").write_bytes(lines(documents(0, 10)) + b"\n")
    (home / "b.jsonl.gz").write_bytes(gzip.compress(lines(documents(10, 28))))
    (home / "c.txt").write_text(documents(28, 29)[0])
    (home / "d.txt.gz").write_bytes(gzip.compress(documents(29, 30)[0].encode()))
    (home / "empty.jsonl").write_bytes(b"")
    return home


# --------------------------------------------------------------------------------------------------------- shards


def test_shards_of_every_kind_give_their_documents(shards: Path, tmp_path: Path) -> None:
    """One part or many, in this process or in others, on this machine or behind a URL."""
    whole = prepare_corpus(str(shards), None, tmp_path / "one", 0.3)
    assert texts_of(whole) == sorted(documents(0, 30))
    assert whole.divided_by == "document"
    assert len(whole.validation)
    many = prepare_corpus(str(shards), None, tmp_path / "many", 0.3, part_bytes=1, workers=2)
    assert len(list((tmp_path / "many").glob("*.bin"))) == 5
    for part in ("train", "validation"):
        assert np.array_equal(np.asarray(getattr(many, part)), np.asarray(getattr(whole, part)))
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    for file in shards.iterdir():
        memory.pipe(f"/{tmp_path.name}/{file.name}", file.read_bytes())
    for url in (f"memory://{tmp_path.name}", f"memory://{tmp_path.name}/*", shards.as_uri()):
        found = prepare_corpus(url, None, tmp_path / "remote", 0.3)
        assert np.array_equal(np.asarray(found.train), np.asarray(whole.train))


def test_parquet_and_zstandard(tmp_path: Path) -> None:
    pyarrow, zstandard = pytest.importorskip("pyarrow"), pytest.importorskip("zstandard")
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "a").mkdir()
    parquet.write_table(pyarrow.table({"id": [1] * 9, "text": documents(0, 9)}), tmp_path / "a" / "a.parquet")
    frames = [zstandard.compress(lines(documents(*each))) for each in ((9, 15), (15, 20))]
    (tmp_path / "a" / "b.jsonl.zst").write_bytes(b"".join(frames))
    found = prepare_corpus(str(tmp_path / "a"), None, tmp_path / "cache", 0.3)
    assert texts_of(found) == sorted(documents(0, 20))
    with pytest.raises(DataError, match=r"has columns id, text: no content. Set --data.field"):
        prepare_corpus(str(tmp_path / "a"), None, tmp_path / "cache", field="content")
    parquet.write_table(pyarrow.table({"text": ["a", None]}), tmp_path / "c.parquet")
    (tmp_path / "d.jsonl.zst").write_bytes(frames[0][:-9])
    (tmp_path / "e.parquet").write_bytes(b"PAR1")
    for name, words in {
        "c.parquet": "row 2: text is null",
        "d.jsonl.zst": "damaged",
        "e.parquet": "Arrow",
    }.items():
        with pytest.raises(DataError, match=words) as error:
            prepare_corpus(str(tmp_path / name), None, tmp_path / "cache")
        assert "\n" not in str(error.value)


def test_objects_of_datasets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": documents(0, 30)})
    found = prepare_corpus(rows, None, tmp_path / "cache", 0.3)
    assert texts_of(found) == sorted(documents(0, 30))
    assert texts_of(prepare_corpus(rows.select(range(9)), None, tmp_path / "cache")) == sorted(documents(0, 9))
    streamed = rows.to_iterable_dataset()
    assert texts_of(prepare_corpus(streamed, None, tmp_path / "cache", 0.3, version="1")) == texts_of(found)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("terminal", [False, True])
def test_progress_of_tokenizing_is_shown(
    shards: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    workers: int,
    terminal: bool,
) -> None:
    """Lines where the output is a file, a bar on a terminal; what was tokenized before counts as done."""
    monkeypatch.setattr("pipeloom.data.progress._LINE_SECONDS", 0.0)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    monkeypatch.setenv("TTY_INTERACTIVE", "1")
    monkeypatch.setenv("COLUMNS", "120")
    total = bytes_text(sum(file.stat().st_size for file in shards.rglob("*") if file.is_file()))
    prepare_corpus(str(shards), None, tmp_path / "cache", 0.3, part_bytes=1, workers=workers)
    shown = capsys.readouterr().out
    if not terminal:
        *_, last = shown.splitlines()
        assert re.fullmatch(rf"tokenized {total} of {total}  [\d,]+ tokens/s", last)
    else:
        assert f"tokenized {total} of {total}" in shown
        assert "left" in shown
    prepare_corpus(str(shards), None, tmp_path / "cache", 0.3, part_bytes=1, workers=workers)
    prepare_corpus(str(shards), None, tmp_path / "other", 0.3, part_bytes=1, workers=workers, shows=False)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("selected", [False, True])
def test_rows_of_datasets_are_tokenized_by_several_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, selected: bool
) -> None:
    datasets = pytest.importorskip("datasets")
    long = "a line of some words\n" * 60_000  # tokenized in pieces
    rows = datasets.Dataset.from_dict({"text": [*documents(0, 40), long, "", "ä\u2028"], "other": list(range(43))})
    if selected:
        rows = rows.select(range(42, 1, -1))
    monkeypatch.setattr("pipeloom.data.datasets._SHARD_BYTES", 3 * rows.data.nbytes // rows.data.num_rows)
    started, start = [], subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *words, **more: started.append(words) or start(*words, **more))
    one = prepare_corpus(rows, None, tmp_path / "one", 0.3, part_bytes=1, workers=1)
    assert not started
    two = prepare_corpus(rows, None, tmp_path / "two", 0.3, part_bytes=1, workers=2)
    assert len(started) == 2
    assert in_cache(tmp_path / "one") == in_cache(tmp_path / "two")
    assert (bytes(one.train[:]), bytes(one.validation[:])) == (bytes(two.train[:]), bytes(two.validation[:]))
    bad = datasets.Dataset.from_dict({"text": ["a", "b", None, "c"]})
    with pytest.raises(DataError, match="Dataset row 2: text is null, and must be a string"):
        prepare_corpus(bad, None, tmp_path / "bad", part_bytes=1, workers=2)


@pytest.mark.parametrize(
    ("library", "source"), [("pyarrow", "a.parquet"), ("zstandard", "a.jsonl.zst"), ("fsspec", "memory://a")]
)
def test_a_missing_library_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str, source: str) -> None:
    (tmp_path / source.rpartition("/")[2]).write_bytes(b"x")
    monkeypatch.setitem(sys.modules, library, None)
    path = source if library == "fsspec" else str(tmp_path / source)
    with pytest.raises(DataError, match=rf"{library} is not installed. Run pip install 'pipeloom\[data\]'"):
        prepare_corpus(path, None, tmp_path / "cache")


def test_the_kind_of_a_file_is_in_its_name() -> None:
    kinds = {
        ".jsonl": ["a.jsonl", "a.JSONL.gz", "a/b.jsonl.zst", "http://host/a.jsonl?key=b.txt"],
        ".parquet": ["a.parquet", "s3://bucket/a.parquet"],
        "": ["a.txt", "a.txt.gz", "jsonl", "a.json", "a.parquet.gz", "http://host/a.txt?b.jsonl"],
    }
    assert {path: kind_of(path) for names in kinds.values() for path in names} == {
        path: kind for kind, names in kinds.items() for path in names
    }


def test_any_iterable_of_records_has_a_version(tmp_path: Path) -> None:
    records = [{"text": text} for text in documents(0, 5)]
    assert texts_of(prepare_corpus(records, None, tmp_path / "cache", version="1")) == sorted(documents(0, 5))
    with pytest.raises(DataError, match="data of type list: has no fingerprint"):
        prepare_corpus(records, None, tmp_path / "cache")
    with pytest.raises(DataError, match="list row 1: text is a int"):
        prepare_corpus([{"text": "a"}, {"text": 3}], None, tmp_path / "cache", version="2")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b'{"text": "a"}\n{bad\n', "a.jsonl line 2 is not JSON"),
        ("a.jsonl", b'\n{"id": 1}\n', "a.jsonl line 2 has id: no text. Set --data.field"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "line 1: text has half of a surrogate pair"),
        ("a.jsonl", b'{"text": "\xff"}\n', "line 1 is not UTF-8 text"),
        ("a.jsonl.gz", gzip.compress(lines(documents(0, 9)))[:-9], "a.jsonl.gz: is damaged"),
        ("a.txt.gz", b"no gzip", "a.txt.gz: is damaged"),
    ],
)
def test_what_cannot_be_read_is_told_in_one_line(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    for workers, part_bytes in ((1, 1 << 20), (2, 1)):
        if workers == 2:
            (tmp_path / "b.txt").write_text("good")
        with pytest.raises(DataError, match=words) as error:
            prepare_corpus(f"{tmp_path}/[ab].*", None, tmp_path / "cache", workers=workers, part_bytes=part_bytes)
        assert "\n" not in str(error.value)
        if name != "a.jsonl":
            break  # processes are the same for all


def test_long_documents_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"line {number}\n" * (number % 3) + " word" for number in range(200_000))
    pieces = pieces_of(text)
    assert "".join(pieces) == text
    assert len(pieces) > 2
    assert max(map(len, pieces)) <= 2**20
    assert all(first[-1] == "\n" and not second[0].isspace() for first, second in pairwise(pieces))
    assert pieces_of("x" * (2**20 + 1)) == ["x" * 2**20, "x"]
    monkeypatch.setattr("pipeloom.data.shards._LARGE", 1000)  # a file of text that is read twice
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.jsonl").write_bytes(lines([text]))
    (tmp_path / "c.txt").write_bytes(text.encode() + b"\xff")
    found = prepare_corpus(str(tmp_path), None, tmp_path / "cache", 0.0)
    assert bytes(found.train[:]) == 2 * (text.encode() + b"\0")
    assert found.skipped == {"not UTF-8 text": 1}


# ---------------------------------------------------------------------------------------------------------- cache


def reading(stops_at: str | None, read: list[str]) -> Callable[..., Iterator[Any]]:
    """`read_texts` that writes down the shards it reads, and is interrupted at one of them."""

    def read_or_stop(shard: Any, field: str) -> Iterator[Any]:
        read.append(shard.name)
        for number, text in enumerate(read_texts(shard, field)):
            if shard.name == stops_at and number == 3:
                raise KeyboardInterrupt
            yield text

    return read_or_stop


def test_tokenizing_goes_on_where_it_was_interrupted(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = prepare_corpus(str(shards), None, tmp_path / "whole", 0.3, part_bytes=1)
    cache, read = tmp_path / "cache", list[str]()

    def prepare(stops_at: str | None = None) -> Corpus:
        read.clear()
        monkeypatch.setattr(tokenizing_file, "read_texts", reading(stops_at, read))
        return prepare_corpus(str(shards), None, cache, 0.3, part_bytes=1, workers=1)

    with pytest.raises(KeyboardInterrupt):
        prepare("b.jsonl.gz")
    assert len(in_cache(cache)) == 2  # one part and what is told about it: nothing that is incomplete
    (cache / ".pipeloom-0123456789abcdef.tmp").write_bytes(b"of a killed process")
    found = prepare()
    assert read == ["b.jsonl.gz", "c.txt", "d.txt.gz", "empty.jsonl"]
    assert (cache / ".pipeloom-0123456789abcdef.tmp").exists() is False
    assert np.array_equal(np.asarray(found.train), np.asarray(expected.train))
    assert found.identity == expected.identity
    prepare()
    assert read == []
    (shards / "new.jsonl").write_bytes(lines(["new"]))
    grown = prepare()
    assert read == ["new.jsonl"]
    assert grown.identity != found.identity
    (shards / "a.jsonl").write_bytes(lines(["changed"]))
    assert "changed" in texts_of(prepare())
    assert read == ["a.jsonl"]


def test_a_full_disk_leaves_no_damaged_cache(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(parts_file._Tokens, "flush", full)
        with pytest.raises(DataError, match=r"No space left on device.*Free disk space") as error:
            prepare_corpus(str(shards), None, tmp_path / "cache")
    assert "\n" not in str(error.value)
    assert in_cache(tmp_path / "cache") == set()
    assert texts_of(prepare_corpus(str(shards), None, tmp_path / "cache")) == sorted(documents(0, 30))


def test_a_killed_process_is_told(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import os, signal, sys; sys.stdin.readline(); os.kill(os.getpid(), signal.SIGKILL)"

    def start(source: str, directory: Path) -> subprocess.Popen[str]:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        return subprocess.Popen([sys.executable, "-c", code], text=True, **pipes)

    monkeypatch.setattr(tokenizing_file, "_start", start)
    with pytest.raises(DataError, match=r"died \(signal 9\).*Lower data.workers"):
        prepare_corpus(str(shards), None, tmp_path / "cache", workers=2, part_bytes=1)


# ---------------------------------------------------------------------------------------------------------- order

_WEIGHTS = st.lists(st.integers(1, 40), min_size=1, max_size=6)


@settings(max_examples=60)
@given(weights=_WEIGHTS, unit=st.sampled_from([1, 0.5, Fraction(1, 7)]))
def test_sources_have_their_share_after_any_number_of_samples(weights: list[int], unit: Any) -> None:
    mixture = Mixture([3] * len(weights), [weight * unit for weight in weights])
    sources, before = mixture.places(0, 2 * sum(weights) + 5)
    for source, weight in enumerate(weights):
        taken = np.cumsum(sources == source)
        assert np.array_equal(before[sources == source], np.arange(taken[-1]))
        share = np.arange(1, len(sources) + 1) * weight / sum(weights)
        assert np.abs(taken - share).max() < 1


def test_weights_without_a_small_denominator_are_rounded() -> None:
    shares = np.array(Mixture([1, 1, 1], [1 / 3, 0.123456789, 2]).shares)
    assert shares.sum() == 2**14
    assert np.abs(shares / 2**14 - np.array([1 / 3, 0.123456789, 2]) / (1 / 3 + 0.123456789 + 2)).max() < 2**-14


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(17, 400), min_size=1, max_size=3),
    weights=st.lists(st.integers(1, 9), min_size=3, max_size=3),
    runs=st.lists(
        st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.integers(0, 9)), min_size=1, max_size=5
    ),
    passed_over=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), max_size=3),
    seed=st.integers(0, 2**40),
)
def test_any_replicas_microbatches_and_resumes_train_on_the_samples_of_an_uninterrupted_run(
    sizes: list[int],
    weights: list[int],
    runs: list[tuple[int, int, int, int]],
    passed_over: list[tuple[int, int]],
    seed: int,
) -> None:
    """Each run: steps, replicas, micro-batches, and samples beyond one per micro-batch in its batches."""
    corpora = [Corpus(*(joined(size, k) for _ in range(2)), None, 1, {}, "") for k, size in enumerate(sizes)]  # type: ignore[arg-type]
    for corpus in corpora:
        object.__setattr__(corpus, "tokenizer", _Same)
    corpus = MixedCorpus(corpora, weights[: len(sizes)]) if len(sizes) > 1 else corpora[0]
    mixture = corpus.mixture(8) if isinstance(corpus, MixedCorpus) else None
    ranges = [(start, start + length) for start, length in passed_over]

    def sampler() -> Sampler:  # a resume makes it anew, from the checkpoint's numbers
        return Sampler(corpus.num_windows(8), seed, ranges, mixture)

    seen, trained = 0, []
    for steps, degree, microbatches, more in runs:
        order, size = sampler(), degree * microbatches + more
        for _ in range(steps):
            indices = order.batch(seen, size)
            for replica in range(degree):
                own = samples_of_replica(size, replica, degree)
                inputs, targets = corpus.windows(indices[own.start : own.stop], 8)
                assert torch.equal(inputs[:, 1:], targets[:, :-1])
                trained += inputs.split(even_parts(len(own), microbatches))
            seen += size
    whole = sampler().batch(0, seen)
    assert torch.equal(torch.cat(trained), corpus.windows(whole, 8)[0])
    if not ranges:  # no sample comes again before all others of its source have come
        starts = np.cumsum([0, *((size - 1) // 8 for size in sizes)])
        for first, last in pairwise(starts.tolist()):
            of_source = whole[(first <= whole) & (whole < last)]
            for start in range(0, len(of_source), last - first):
                epoch = of_source[start : start + last - first]
                assert len(set(epoch.tolist())) == len(epoch)


class _Same:
    fingerprint = b""


def joined(size: int, source: int) -> parts_file.Joined:
    tokens = np.arange(size) + 1000 * source
    return parts_file.Joined([tokens[: size // 3], tokens[size // 3 : size // 2], tokens[size // 2 :]], tokens.dtype)


def test_a_mixture_trains_and_goes_on_with_other_ranks_and_microbatches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, letter in (("a", "x"), ("b", "y")):
        (tmp_path / name).mkdir()
        rows = [f"{letter * (40 + number)}" for number in range(12)]
        (tmp_path / name / "0.jsonl").write_bytes(lines(rows))
    taken: list[int] = []
    windows = MixedCorpus.windows

    def written_down(self: MixedCorpus, indices: Any, length: int, part: Any = "train") -> Any:
        taken.extend(np.asarray(indices).tolist() if part == "train" else [])
        return windows(self, indices, length, part)

    monkeypatch.setattr(MixedCorpus, "windows", written_down)
    mixture = f"--data.mixture={tmp_path / 'a'}=3,{tmp_path / 'b'}=1"
    more = ("--data.path=null", mixture, "--sample_tokens=0", "--save_steps=2", "--eval_steps=2", "--batch.size=8")
    local(tmp_path, tmp_path / "out", *more, "--steps=2", "--batch.microbatches=2")
    resume = ("--resume_from_checkpoint=latest", "--parallel.pipeline=1", "--batch.microbatches=4")
    local(tmp_path, tmp_path / "out", *more, *resume, "--steps=4")
    corpora = [prepare_corpus(str(tmp_path / name), None, tmp_path / "out" / "data", 0.3) for name in ("a", "b")]
    expected = MixedCorpus(corpora, [3, 1]).sampler(16, 0).batch(0, 32)
    assert taken == expected.tolist()
    assert (expected >= corpora[0].num_windows(16)).sum() == 8


def test_a_source_that_is_too_short_is_named(tmp_path: Path) -> None:
    corpora = [prepare_corpus([{"text": text}], None, tmp_path, 0.0, version=text) for text in ("long " * 9, "short")]
    with pytest.raises(DataError, match="source 2 of the mixture: the train data has 6 tokens"):
        MixedCorpus(corpora, [1, 1]).sampler(8, seed=0)


def test_a_mixture_has_one_weight_above_0_per_corpus(tmp_path: Path) -> None:
    corpus = prepare_corpus([{"text": "long " * 9}], None, tmp_path, 0.0, version="1")
    for corpora, weights in (([], []), ([corpus], [1, 2]), ([corpus, corpus], [1])):
        with pytest.raises(DataError, match=f"for {len(corpora)} corpora: there must be one per corpus"):
            MixedCorpus(corpora, weights)
    for weight in (0, -1, float("nan"), float("inf"), "many", "1/0"):
        with pytest.raises(DataError, match=re.escape(f"weights=['{weight}']: each source needs a weight")):
            MixedCorpus([corpus], [weight])


def test_a_byte_order_mark_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "marked.txt").write_bytes(b"\xef\xbb\xbfhello")
    corpus = prepare_corpus(tmp_path / "marked.txt", None, tmp_path / "tokens", 0.0)
    assert corpus.tokenizer.decode(corpus.train[:].tolist()) == "hello\n"


def test_mixtures_are_paths_and_weights() -> None:
    assert weighted_paths("a/=0.7, s3://b/*.parquet=3") == [("a/", Fraction("0.7")), ("s3://b/*.parquet", Fraction(3))]
    for wrong, words in {"a": "must be a path", "a=-1": "above 0", "=1": "path", "a=1,a=2": "names a twice"}.items():
        with pytest.raises(DataError, match=words):
            weighted_paths(wrong)


class BlockFileSystem(fsspec.AbstractFileSystem):
    """Local files that are read block by block, as those behind http:// and s3:// are."""

    protocol = "blocks"

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        return {"name": path, "size": Path(path).stat().st_size, "type": "file"}

    def _open(self, path: str, mode: str = "rb", **_: Any) -> AbstractBufferedFile:
        return _BlockFile(self, path, mode)


class _BlockFile(AbstractBufferedFile):
    def _fetch_range(self, start: int, end: int) -> bytes:
        return Path(self.path).read_bytes()[start:end]


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz"])
def test_lines_of_files_that_are_read_in_blocks(tmp_path: Path, name: str) -> None:
    fsspec.register_implementation("blocks", BlockFileSystem, clobber=True)
    text = b'{"text": "one"}\n{"text": "two"}\n'
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    with opened(f"blocks://{tmp_path / name}") as file:
        assert [file.content.readline(100), file.content.readline(5), file.content.readline(100)] == [
            b'{"text": "one"}\n',
            b'{"tex',
            b't": "two"}\n',
        ]
