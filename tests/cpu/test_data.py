"""Training data: every token once, every window once an epoch, the same for every process and after every resume."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom.data import opened
from pipeloom.data.corpus import Corpus, prepare_corpus
from pipeloom.data.sampler import Sampler
from pipeloom.errors import DataError
from pipeloom.train.data.samples import Windows
from pipeloom.train.data.written import writer_in

# ------------------------------------------------------------------------------------------------------- sampler


@settings(max_examples=100, deadline=None)
@given(
    num_windows=st.integers(1, 40),
    seed=st.integers(-(2**40), 2**70),
    batches=st.lists(st.integers(0, 25), min_size=1, max_size=12),
    resumed=st.lists(st.integers(1, 12)),
)
def test_any_batch_sizes_and_resume_points_give_one_sequence(num_windows, seed, batches, resumed):
    total = sum(batches)
    whole = Sampler(num_windows, seed).batch(0, total)
    position, sampler, drawn = 0, Sampler(num_windows, seed), []
    for index, count in enumerate(batches):
        if index in resumed:
            sampler = Sampler(num_windows, seed)
        drawn.append(sampler.batch(position, count))
        position += count
    assert np.array_equal(np.concatenate(drawn), whole)
    for epoch in range(total // num_windows):
        assert sorted(whole[epoch * num_windows : (epoch + 1) * num_windows]) == list(range(num_windows))


def test_epochs_and_seeds_are_shuffled_apart():
    sampler = Sampler(1000, 7)
    first, second = sampler.batch(0, 1000), sampler.batch(1000, 1000)
    assert not np.array_equal(first, np.arange(1000))
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, Sampler(1000, 8).batch(0, 1000))
    with pytest.raises(DataError):
        Sampler(0, 1)


# -------------------------------------------------------------------------------------------------------- corpus


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Sixty small documents in nested directories, and what has to be passed over."""
    root = tmp_path / "texts"
    for index in range(60):
        file = root / f"part{index % 3}" / f"{index:02}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"document {index} é " + "x" * (index % 7) + "\n", encoding="utf-8")
    (root / "image.bin").write_bytes(bytes(range(256)))
    (root / "nul.txt").write_bytes(b"a\0b")
    (root / "empty.txt").write_bytes(b"")
    (root / ".hidden").write_text("hidden")
    (root / ".git").mkdir()
    (root / ".git" / "config").write_text("hidden")
    (root / "gone.txt").symlink_to(root / "nowhere")
    os.mkfifo(root / "pipe.txt")
    return root


def documents(tokens: np.ndarray) -> list[bytes]:
    tokens = np.asarray(tokens)
    assert tokens[-1] == 0
    return bytes(tokens).split(b"\0")[:-1]


def test_every_document_once_and_whole(texts: Path, tmp_path: Path):
    corpus = prepare_corpus(str(texts), None, tmp_path / "cache", validation_fraction=0.2)
    assert corpus.divided_by == "document"
    assert (corpus.num_files, corpus.tokenizer.vocabulary_size) == (60, 256)
    assert corpus.skipped == {"not UTF-8 text": 2, "empty": 1, "broken link": 1, "no regular file": 1}
    train, validation = documents(corpus.train), documents(corpus.validation)
    expected = [
        f.read_bytes() for f in texts.rglob("*.txt") if f.name not in ("nul.txt", "empty.txt", "gone.txt", "pipe.txt")
    ]
    assert sorted(train + validation) == sorted(expected)
    assert 3 <= len(validation) <= 25


def test_a_file_stays_on_its_side_when_others_come(texts: Path, tmp_path: Path):
    before = set(documents(prepare_corpus(str(texts), None, tmp_path / "cache", 0.2).validation))
    for index in range(20):
        (texts / f"new{index}.txt").write_text(f"new {index}")
    after = prepare_corpus(str(texts), None, tmp_path / "cache", 0.2)
    assert before <= set(documents(after.validation))
    assert not before & set(documents(after.train))
    moved = texts.rename(tmp_path / "elsewhere")
    again = prepare_corpus(str(moved), None, tmp_path / "cache", 0.2)
    assert np.array_equal(again.train, after.train)


def test_one_file_is_divided_by_position(tmp_path: Path):
    file = tmp_path / "one.txt"
    file.write_text("0123456789" * 100)
    corpus = prepare_corpus(str(file), None, tmp_path / "cache", 0.1)
    assert corpus.divided_by == "position"
    assert bytes(np.concatenate([corpus.train, corpus.validation])) == file.read_bytes() + b"\0"
    assert len(corpus.validation) == 100
    assert len(prepare_corpus(str(file), None, tmp_path / "cache", 0.0).validation) == 0


def test_glob_takes_what_it_matches(texts: Path, tmp_path: Path):
    corpus = prepare_corpus(str(texts / "part*" / "0?.txt"), None, tmp_path / "cache")
    assert corpus.num_files == 10
    assert prepare_corpus(str(texts / "**" / "*.txt"), None, tmp_path / "cache").num_files == 60


def test_the_default_is_the_standard_library(tmp_path: Path):
    corpus = prepare_corpus(None, None, tmp_path)
    assert corpus.divided_by == "document"
    assert len(corpus.train) > 2_000_000
    assert 0.02 < len(corpus.validation) / len(corpus.train) < 0.12
    text = bytes(corpus.train[:]) + bytes(corpus.validation[:])
    assert Path(sysconfig.get_path("stdlib"), "argparse.py").read_bytes() in text
    assert Path(torch.__file__).read_bytes() not in text  # an installed package


def test_a_stream_is_used_again_until_something_changes(texts: Path, tmp_path: Path):
    cache = tmp_path / "cache"
    prepare_corpus(str(texts), None, cache)
    (stream,) = cache.glob("*.bin")
    first = stream.stat().st_ino
    old = prepare_corpus(str(texts), None, cache)
    assert stream.stat().st_ino == first
    with stream.open("ab") as out:  # damaged: made anew
        out.write(b"!")
    prepare_corpus(str(texts), None, cache)
    assert stream.stat().st_ino != first
    changed = texts / "part0" / "00.txt"
    stat = changed.stat()
    changed.write_bytes(changed.read_bytes().upper())
    os.utime(changed, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    new = prepare_corpus(str(texts), None, cache)
    assert not np.array_equal(new.train, old.train)
    assert {path.suffix for path in cache.iterdir()} == {".bin", ".json"}  # no temporary file stays


def test_the_cache_may_lie_inside_the_data(texts: Path):
    first = prepare_corpus(str(texts), None, texts / "cache")
    second = prepare_corpus(str(texts), None, texts / "cache")
    assert np.array_equal(first.train, second.train)
    assert len(list((texts / "cache").iterdir())) == 2


def test_what_runs_wrote_between_the_text_is_no_text(texts: Path, monkeypatch: pytest.MonkeyPatch):
    """Whatever directory the run and earlier ones write to, and however the text is named, it is the same text."""

    def run(path: str, output: str) -> Corpus:
        corpus = prepare_corpus(path, None, Path(output, "data"), 0.2, writer_in=writer_in(Path(output)))
        for name in (
            "metrics.jsonl",
            "report.html",
            "checkpoint-3/manifest.json",
            "previous-1/config.yaml",
            "log/mine.txt",
        ):
            Path(output, name).parent.mkdir(parents=True, exist_ok=True)
            Path(output, name).write_text("# pipeloom 1: by a run")
        Path(output, "config.yaml").write_text("# pipeloom 1: of a run")
        return corpus

    monkeypatch.chdir(texts)
    (texts / "config.yaml").write_text("the: user's own\n")
    first = prepare_corpus(".", None, texts.parent / "apart", 0.2)
    assert (first.num_files, first.left_out) == (61, [])
    for output in ("runs/one", "runs/one", "two"):
        for path in (".", str(texts), "**/*"):
            found = run(path, output)
            assert np.array_equal(found.train, first.train), (output, path, found.left_out)
            assert np.array_equal(found.validation, first.validation)
    assert prepare_corpus(".", None, texts.parent / "apart", writer_in=writer_in(None)).left_out == [
        Path("runs/one"),
        Path("two"),
    ]
    for output in ("two", "runs/one"):
        shutil.rmtree(output)
    (texts / "config.yaml").unlink()
    for _ in range(2):  # a run that writes to where its text is
        assert run(".", ".").num_files == 60
        Path("log/mine.txt").unlink()
    assert "a directory for the output of a run" in refusal(
        "metrics.jsonl", None, Path("data"), writer_in=writer_in(Path())
    )


def _prepare(path: str, cache: Path, start, results) -> None:
    start.wait()
    corpus = prepare_corpus(path, None, cache, 0.2)
    results.put((bytes(corpus.train[:]), bytes(corpus.validation[:])))


def test_several_processes_at_once_end_with_the_same(texts: Path, tmp_path: Path):
    context = multiprocessing.get_context("fork")
    results, start = context.SimpleQueue(), context.Barrier(3)
    processes = [
        context.Process(target=_prepare, args=(str(texts), tmp_path / "cache", start, results)) for _ in range(3)
    ]
    for process in processes:
        process.start()
    got = [results.get() for _ in processes]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert got[0] == got[1] == got[2]
    assert sorted(path.suffix for path in (tmp_path / "cache").iterdir()) == [".bin", ".json"]


# ------------------------------------------------------------------------------------------------------- windows


def test_windows_cover_the_stream_and_targets_are_one_on(tmp_path: Path):
    (tmp_path / "a.txt").write_text("".join(chr(33 + i % 90) for i in range(500)))
    corpus = prepare_corpus(str(tmp_path / "a.txt"), None, tmp_path / "cache", 0.1)
    count = corpus.num_windows(16)
    assert count == (len(corpus.train) - 1) // 16
    inputs, targets = corpus.windows(range(count), 16)
    assert inputs.shape == targets.shape == (count, 16)
    assert inputs.dtype == targets.dtype == torch.int64
    assert bytes(inputs.flatten().tolist()) == bytes(corpus.train[: count * 16])
    assert bytes(targets.flatten().tolist()) == bytes(corpus.train[1 : count * 16 + 1])
    chosen = [3, 0, 3]
    assert torch.equal(corpus.windows(chosen, 16)[0], inputs[chosen])
    fits = Corpus(corpus.train.cut(0, 33), corpus.validation, corpus.tokenizer, 1, 0, "position")
    assert fits.num_windows(16) == 2
    with pytest.raises(DataError, match="50 tokens: one window needs 51 "):
        corpus.num_windows(50, "validation")


def test_validation_batches_are_the_first_ones(tmp_path: Path):
    (tmp_path / "a.txt").write_text("ab" * 500)
    corpus = prepare_corpus(str(tmp_path / "a.txt"), None, tmp_path / "cache", 0.2)
    windows = Windows(corpus, 8, labelled=False, found="", notices=[])
    batches = [windows.batch(each, 1, "validation") for each in windows.validation_batches(4, 3)]
    assert [x.shape for x, _ in batches] == [(4, 8)] * 3
    assert bytes(torch.cat([x for x, _ in batches]).flatten().tolist()) == bytes(corpus.validation[:96])
    assert len(list(windows.validation_batches(4, 100))) == 6  # 24 windows: six full batches
    assert [len(each) for each in windows.validation_batches(100, 5)] == [24]  # not one full batch


# ----------------------------------------------------------------------------------------------------- tokenizer


@pytest.fixture
def tokenizer_file(texts: Path, tmp_path: Path) -> str:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(file) for file in texts.glob("part*/*.txt")], trainer)
    file = tmp_path / "tokenizer.json"
    tokenizer.save(str(file))
    return str(file)


def test_a_tokenizer_file_gives_its_own_ids(texts: Path, tmp_path: Path, tokenizer_file: str):
    corpus = prepare_corpus(str(texts / "part0" / "*.txt"), tokenizer_file, tmp_path / "cache", 0.2)
    plain = prepare_corpus(str(texts / "part0" / "*.txt"), None, tmp_path / "cache", 0.2)
    assert corpus.train.dtype == np.uint16
    assert corpus.tokenizer.vocabulary_size == len(json.loads(Path(tokenizer_file).read_text())["model"]["vocab"])
    assert len(corpus.train) < len(plain.train)  # a pair or more becomes one token
    text = corpus.tokenizer.decode(np.concatenate([corpus.train, corpus.validation]).tolist())
    pieces = text.split("<|endoftext|>")[:-1]
    assert sorted(pieces) == sorted(f.read_text(encoding="utf-8") for f in texts.glob("part0/*.txt"))


def test_bytes_decode_to_text(texts: Path, tmp_path: Path):
    corpus = prepare_corpus(str(texts / "part1" / "01.txt"), None, tmp_path / "cache", 0.0)
    assert corpus.tokenizer.decode(corpus.train[:].tolist()) == "document 1 é x\n\n"
    assert corpus.tokenizer.decode([0xC3, 65]) == "\N{REPLACEMENT CHARACTER}A"


# -------------------------------------------------------------------------------------------------------- errors


def refusal(path, tokenizer, directory: Path, **more) -> str:
    with pytest.raises(DataError) as error:
        prepare_corpus(path, tokenizer, directory, **more)
    message = str(error.value)
    assert "\n" not in message
    return message


def test_refusals_say_what_is_wrong_in_one_line(texts: Path, tmp_path: Path):
    cache = tmp_path / "cache"
    (tmp_path / "nothing").mkdir()
    (tmp_path / "plain").write_text("x")
    assert "'/no/such' does not exist" in refusal("/no/such", None, cache)
    assert "has no files" in refusal(str(tmp_path / "*.nothing"), None, cache)
    assert "is a device, a pipe or a socket" in refusal("/dev/zero", None, cache)
    assert "is a device, a pipe or a socket" in refusal(str(texts / "pipe.txt"), None, cache)
    assert "has no files" in refusal("/dev/zer[o]", None, cache)
    assert f"its 65 files are in {tmp_path}" not in (inside := refusal(str(texts), None, tmp_path))
    assert f"are in {tmp_path}, a directory for the output" in inside
    assert "has no files" in refusal(str(tmp_path / "nothing"), None, cache)
    assert "not UTF-8 text" in refusal(str(texts / "image.bin"), None, cache)
    assert "all empty" in refusal(str(texts / "empty.txt"), None, cache)
    assert "plain cannot be read or written (File exists)" in refusal(str(texts), None, tmp_path / "plain")
    assert "Not a directory" in refusal(str(texts), None, tmp_path / "plain" / "cache")
    assert "validation_fraction=1" in refusal(str(texts), None, cache, validation_fraction=1)
    assert not any(file.stat().st_size for file in cache.glob("*.bin"))


def test_unreadable_files_are_named(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse_one(path: str, mode: str) -> IO[Any]:  # a mode would not stop the superuser
        if path.endswith("07.txt"):
            raise PermissionError(13, "Permission denied", path)
        return open(path, mode)

    monkeypatch.setattr(opened, "open", refuse_one, raising=False)
    assert "07.txt: Permission denied" in refusal(str(texts), None, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_bad_tokenizers_are_refused(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("tokenizers")
    (tmp_path / "bad.json").write_text("{}")
    assert "is not a JSON file of the tokenizers library" in refusal(
        str(texts), str(tmp_path / "bad.json"), tmp_path / "cache"
    )
    assert "No such file" in refusal(str(texts), str(tmp_path / "none.json"), tmp_path / "cache")
    assert "is a device, a pipe or a socket" in refusal(str(texts), "/dev/zero", tmp_path / "cache")
    with monkeypatch.context() as patched:
        patched.setattr("tokenizers.Tokenizer", SimpleNamespace(from_str=Mock(side_effect=MemoryError)))
        words = refusal(str(texts), str(tmp_path / "bad.json"), tmp_path / "cache")
    assert "is not a JSON file of the tokenizers library (MemoryError)" in words
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert "pip install 'pipeloom[tokenizers]'" in refusal(str(texts), "any.json", tmp_path / "cache")
