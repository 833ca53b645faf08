"""A flipped bit in a file of tokens ends what reads it with one line, before the tokens are used."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeloom.chaos.flip import flip_at
from pipeloom.cli import main
from pipeloom.data import Corpus, MixedCorpus, prepare_corpus, token_cache
from pipeloom.data.pretrained_tokenizer import PretrainedTokenizer
from pipeloom.data.shards import Shard
from pipeloom.data.token_cache import BLOCK_BYTES, SummedFile
from pipeloom.errors import DataError
from pipeloom.train.data.documents import Documents, prepare_documents
from pipeloom.train.data.samples import Windows
from tests.cpu.fine_tuning import records, save_llama, write_lines
from tests.cpu.train_runs import launched, local, metrics, story, text, words  # noqa: F401

LENGTH = 1 << 10
PER_BLOCK = BLOCK_BYTES // LENGTH  # windows of a block; the last one reads into the next block


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Text of three blocks and a half, of a byte per token."""
    draw = np.random.Generator(np.random.PCG64(0))
    path = tmp_path / "a.txt"
    path.write_bytes(draw.integers(32, 127, BLOCK_BYTES * 7 // 2, np.uint8).tobytes())
    return path


def prepared(file: str | Path, fraction: float = 0.0) -> Corpus:
    return prepare_corpus(str(file), None, cache_of(file), fraction)


def cache_of(file: str | Path) -> Path:
    return Path(file).parent / "cache"


def tokens_of(cache: Path) -> Path:
    [found] = cache.glob("corpus-*.bin")
    return found


def damaged(file: Path, block: int, read: Callable[[], Any]) -> None:
    """Check the line about a block."""
    with pytest.raises(DataError) as raised:
        read()
    said = str(raised.value)
    assert "\n" not in said
    assert said.startswith(f"the token cache {file} is damaged: bytes {block * BLOCK_BYTES} to ")
    assert said.endswith("Delete this file; the next run makes it again.")


def test_a_damaged_block_is_told_when_it_is_read_and_others_are_not(file: Path) -> None:
    whole = bytes(prepared(file).train[:])
    flip_at(tokens_of(cache_of(file)), BLOCK_BYTES + 17)
    corpus = prepared(file)
    for window in (0, PER_BLOCK - 2, 2 * PER_BLOCK, 3 * PER_BLOCK + 5):
        start = window * LENGTH
        assert bytes(corpus.windows([window], LENGTH)[0].byte().numpy()) == whole[start : start + LENGTH]
    for window in (PER_BLOCK - 1, PER_BLOCK, 2 * PER_BLOCK - 1):
        for _ in range(2):  # it stays damaged
            damaged(tokens_of(cache_of(file)), 1, lambda window=window: corpus.windows([0, window], LENGTH))
    tokens_of(cache_of(file)).unlink()
    assert bytes(prepared(file).train[:]) == whole


def test_every_byte_has_a_checksum(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"0123456789")
    prepared(tmp_path / "a.txt")
    for position in range(11):
        flip_at(tokens_of(tmp_path / "cache"), position)
        damaged(tokens_of(tmp_path / "cache"), 0, lambda: prepared(tmp_path / "a.txt").train[:])
        flip_at(tokens_of(tmp_path / "cache"), position)
    assert bytes(prepared(tmp_path / "a.txt").train[:]) == b"0123456789\0"


def test_a_block_is_compared_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    prepared(file)
    corpus = prepared(file)
    monkeypatch.setattr(token_cache, "crc32", lambda *given: compared.append(len(given[0])) or crc32(*given))
    corpus.windows([0, 1, 2, 0], LENGTH)
    assert compared == [BLOCK_BYTES]
    for _ in range(2):
        assert len(corpus.train[:]) == BLOCK_BYTES * 7 // 2 + 1
        corpus.windows(range(corpus.num_windows(LENGTH)), LENGTH)
    assert compared == [BLOCK_BYTES] * 3 + [BLOCK_BYTES // 2 + 1]


@given(pieces=st.lists(st.integers(0, 3 * BLOCK_BYTES), max_size=6))
def test_checksums_are_those_of_the_blocks_however_they_were_written(pieces: list[int]) -> None:
    out = io.BytesIO()
    out.name = "a"  # type: ignore[attr-defined]
    summed = SummedFile(out)
    for number, size in enumerate(pieces):
        numbers = np.arange(number, number + size // 2, dtype=np.uint16)
        assert summed.write(numbers.data if number % 2 else numbers.tobytes()) == numbers.nbytes
    content = out.getvalue()
    assert summed.sums == [crc32(content[at : at + BLOCK_BYTES]) for at in range(0, len(content), BLOCK_BYTES)]


def test_a_cache_without_checksums_and_one_whose_json_is_damaged_are_made_again(file: Path) -> None:
    made = prepared(file, 0.1)
    tokens = tokens_of(cache_of(file))
    about = tokens.with_suffix(".json")
    content, facts = about.read_bytes(), json.loads(about.read_bytes())

    def changed(**changes: Any) -> bytes:
        return json.dumps({key: value for key, value in {**facts, **changes}.items() if value is not None}).encode()

    for wrong in (
        changed(checksums=None),  # as an earlier release wrote it
        changed(checksums=""),
        changed(checksums=facts["checksums"][:-8]),
        changed(checksums=facts["checksums"] + "00"),
        changed(checksums="x" + facts["checksums"][1:]),
        changed(num_train_tokens=facts["num_train_tokens"] - 1),
        changed(digest=facts["digest"][::-1]),
        b"",
    ):
        before = tokens.stat().st_ino
        about.write_bytes(wrong)
        again = prepared(file, 0.1)
        assert tokens.stat().st_ino != before
        assert about.read_bytes() == content
        assert again.identity == made.identity
        assert bytes(again.train[:]) == bytes(made.train[:])
    about.unlink()
    prepared(file, 0.1)
    assert about.read_bytes() == content
    about.write_bytes(changed(checksums="0" * 8 + facts["checksums"][8:]))  # of a block: told when it is read
    damaged(tokens, 0, lambda: prepared(file, 0.1).windows([0], LENGTH))


def test_validation_and_mixtures_are_checked(file: Path, tmp_path: Path) -> None:
    assert len(prepared(file, 0.2).train) // BLOCK_BYTES == 2
    tokens = tokens_of(cache_of(file))
    flip_at(tokens, tokens.stat().st_size - 9)
    samples = Windows(prepared(file, 0.2), LENGTH, labelled=False, found="", notices=[])
    samples.batch([0], 1)
    last = samples.num_samples("validation") - 1
    damaged(tokens, 3, lambda: samples.batch([last], 1, "validation"))
    damaged(tokens, 3, samples.largest_id)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "b.txt").write_bytes(b"b" * 9 * LENGTH)
    other = prepared(tmp_path / "other" / "b.txt", 0.2)
    mixed = MixedCorpus([other, prepared(file, 0.2)], [1, 1])
    mixed.windows([0, other.num_windows(LENGTH)], LENGTH)
    damaged(tokens, 3, lambda: mixed.windows([0, mixed.num_windows(LENGTH, "validation") - 1], LENGTH, "validation"))


def test_each_part_is_checked(tmp_path: Path) -> None:
    parts = tmp_path / "parts"
    parts.mkdir()
    for name in "ab":
        (parts / f"{name}.txt").write_text(name * 99)
    prepare_corpus(str(parts), None, tmp_path / "two", 0.0, part_bytes=1)
    [second] = (each for each in (tmp_path / "two").glob("*.bin") if each.read_bytes().startswith(b"b"))
    flip_at(second, 5)
    made = prepare_corpus(str(parts), None, tmp_path / "two", 0.0, part_bytes=1)
    assert bytes(made.train[:100]) == b"a" * 99 + b"\0"
    damaged(second, 0, lambda: made.train[90:110])
    damaged(second, 0, lambda: np.asarray(made.train))


def test_tokens_of_a_url_are_checked(file: Path, tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    url = f"memory://{tmp_path.name}/a.txt"
    fsspec.filesystem("memory").pipe(f"/{tmp_path.name}/a.txt", file.read_bytes())
    prepare_corpus(url, None, tmp_path / "remote", 0.0)
    flip_at(tokens_of(tmp_path / "remote"), 3)
    damaged(tokens_of(tmp_path / "remote"), 0, lambda: prepare_corpus(url, None, tmp_path / "remote", 0.0).train[:9])


@pytest.mark.parametrize("packing", [False, True])
def test_documents_are_checked(tmp_path: Path, packing: bool) -> None:
    save_llama(tmp_path / "llama")
    lines = [{"text": "x" * 30_000}, {"text": "y" * 300}, *records(9)]
    source = Shard.of(write_lines(tmp_path / "a.jsonl", lines), tmp_path)

    def opened() -> Documents:
        tokenizer = PretrainedTokenizer(tmp_path / "llama")
        found = prepare_documents([source], str(tmp_path), tokenizer, tmp_path / "cache", 0.0)
        return Documents(*found, tokenizer, 512, packing=packing)

    made = opened()
    tokens = tokens_of(tmp_path / "cache")
    flip_at(tokens, 40)
    again = opened()  # reads lengths, and what of prompts and conversations is scored
    every = range(again.num_samples())
    damaged(tokens, 0, lambda: again.batch(every, 1))
    damaged(tokens, 0, again.largest_id)
    flip_at(tokens, 40)
    inputs, _ = opened().batch(every, 1)
    assert (inputs[0]["input_ids"] == made.batch(every, 1)[0][0]["input_ids"]).all()
    flip_at(tokens, tokens.stat().st_size - 1)
    damaged(tokens, tokens.stat().st_size // BLOCK_BYTES, opened)


def test_a_resumed_run_ends_with_the_line_and_goes_on_when_the_file_is_deleted(
    text: Path,  # noqa: F811
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    local(text, tmp_path)
    told = story(tmp_path)
    tokens = tokens_of(tmp_path / "data")
    flip_at(tokens, 100)
    resumed = words(text, tmp_path, f"--resume_from_checkpoint={tmp_path / 'checkpoint-3'}")
    capfd.readouterr()
    assert main([*resumed, "--local"]) == 1
    of_processes = launched(resumed)
    assert of_processes.returncode == 1
    for said in (capfd.readouterr().err, of_processes.stderr):
        assert said.count("\n") == 1, said
        assert f"the token cache {tokens} is damaged: bytes 0 to " in said
    assert max(row["step"] for row in metrics(tmp_path)) == 3  # nothing was trained
    tokens.unlink()
    assert main([*resumed, "--local"]) == 0
    assert story(tmp_path) == told
