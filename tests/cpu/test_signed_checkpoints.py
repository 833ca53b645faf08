"""Checkpoints that are signed with a key, and those that are refused."""

from __future__ import annotations

import hashlib
import hmac
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeloom.cli import main
from pipeloom.common.checkpoint_key import SIGNATURE_NAME, CheckpointKey
from pipeloom.errors import CheckpointError, InputError
from pipeloom.train import checkpoint as ck
from pipeloom.train.checkpoint.convert import convert
from pipeloom.train.checkpoint.manifest import MANIFEST_NAME, SEAL_NAME, read_manifest, seal, verify
from pipeloom.train.checkpoint.resume import find_good
from tests.cpu.train_runs import metrics, run, text, words  # noqa: F401

SECRET = "9b3e7a51c0d24f6e8812"


@pytest.fixture
def key(tmp_path: Path) -> CheckpointKey:
    (tmp_path / "key").write_text(f"{SECRET}\n")
    found = CheckpointKey.read(tmp_path / "key")
    assert found is not None
    return found


def saved(out: Path, step: int, key: CheckpointKey | None) -> Path:
    return ck.save(out, step, model={}, state={"n": step}, key=key)


def test_the_signature_is_that_of_the_manifest(tmp_path: Path, key: CheckpointKey) -> None:
    path = saved(tmp_path, 4, key)
    expected = hmac.new(SECRET.encode(), (path / MANIFEST_NAME).read_bytes(), hashlib.sha256).hexdigest()
    assert (path / SIGNATURE_NAME).read_text() == f"{expected}\n"
    assert verify(path, key).step == verify(path).step == ck.load(path, key=key).step == 4
    assert SECRET not in f"{key} {key!r} {vars(key).get('path')}"


def forge(path: Path) -> None:
    """What somebody without the key can do: another content, with hashes that fit."""
    manifest = (path / MANIFEST_NAME).read_bytes().replace(b'"n": 4', b'"n": 5')
    (path / MANIFEST_NAME).write_bytes(manifest)
    (path / SEAL_NAME).write_bytes(seal(manifest))


def strip(path: Path) -> None:
    (path / SIGNATURE_NAME).unlink()


def sign_otherwise(path: Path) -> None:
    key = CheckpointKey(path, b"another key, of enough bytes")
    (path / SIGNATURE_NAME).write_bytes(key.sign((path / MANIFEST_NAME).read_bytes()))


def cut(path: Path) -> None:
    (path / SIGNATURE_NAME).write_bytes((path / SIGNATURE_NAME).read_bytes()[:-2])


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (forge, "does not fit the manifest and the key in"),
        (sign_otherwise, "does not fit the manifest and the key in"),
        (cut, "does not fit the manifest and the key in"),
        (strip, f"is not signed: it has no {SIGNATURE_NAME}, and checkpoint_key_file="),
    ],
    ids=["forged", "another-key", "cut", "missing"],
)
def test_every_reader_refuses_what_the_key_did_not_sign(
    tmp_path: Path, key: CheckpointKey, capsys: pytest.CaptureFixture[str], change: Callable[[Path], None], rule: str
) -> None:
    good, path = saved(tmp_path, 3, key), saved(tmp_path, 4, key)
    change(path)
    assert verify(path).state["n"] == (5 if change is forge else 4)  # without the key it is a good one
    readers: list[Callable[[], object]] = [
        lambda: read_manifest(path, key),
        lambda: ck.load(path, key=key),
        lambda: convert(path, tmp_path / "converted", key=key),
        lambda: find_good("latest", tmp_path, leads=True, key=key),
        lambda: find_good(str(path), tmp_path, leads=True, key=key),
    ]
    for read in readers:
        with pytest.raises(CheckpointError, match=rule) as caught:
            read()
        assert "\n" not in str(caught.value)
        assert SECRET not in str(caught.value)
    for command in (["verify", str(path)], ["convert", str(path), str(tmp_path / "converted")]):
        assert main(["checkpoint", *command, f"--checkpoint_key_file={key.path}"]) == 2
        assert rule in capsys.readouterr().err
    assert not (tmp_path / "converted").exists()
    found = find_good("auto", tmp_path, leads=True, key=key)
    assert found is not None
    assert found.path == good
    assert "kept as checkpoint-4.damaged" in found.notices[0]


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (b"short\n", "has 5 bytes, and a key must have"),
        (b"x" * 70_000, "more than"),
        (None, "No such file"),
    ],
)
def test_unfit_keys_are_told(tmp_path: Path, content: bytes | None, rule: str) -> None:
    if content is not None:
        (tmp_path / "key").write_bytes(content)
    with pytest.raises(InputError, match=rule):
        CheckpointKey.read(tmp_path / "key")


def test_a_signed_checkpoint_under_the_name_of_another_step_is_refused(tmp_path: Path, key: CheckpointKey) -> None:
    good, old = saved(tmp_path, 3, key), saved(tmp_path, 2, key)
    moved = old.rename(tmp_path / "checkpoint-9")
    assert verify(moved).step == 2
    for read in (read_manifest, verify):
        with pytest.raises(CheckpointError, match=r"checkpoint-9 is signed as the checkpoint of step 2\. Rename it"):
            read(moved, key)
    found = find_good("auto", tmp_path, leads=True, key=key)
    assert found is not None
    assert found.path == good


def test_directories_of_hugging_face_have_no_signature(tmp_path: Path, key: CheckpointKey) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    (tmp_path / "hf" / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="is a Hugging Face directory, which has no signature"):
        ck.load(tmp_path / "hf", key=key)


def test_a_run_signs_resumes_and_tells_nobody_the_key(
    text: Path,  # noqa: F811
    tmp_path: Path,
    key: CheckpointKey,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, options = tmp_path / "out", (f"--checkpoint_key_file={key.path}", "--eval_steps=0", "--sample_tokens=0")
    done = run(text, out, *options, "--steps=2", "--save_steps=1", "--background_saves=true")
    assert done.returncode == 0, done.stderr
    assert main(["checkpoint", "verify", str(out), f"--checkpoint_key_file={key.path}"]) == 0
    assert "checkpoint-2: ok, signed, step 2" in capsys.readouterr().out
    command = words(text, out, "--local", *options, "--steps=3", "--resume_from_checkpoint=latest")
    assert main(command) == 0
    assert [row["step"] for row in metrics(out)] == [1, 2, 3]
    texts = [done.stdout, done.stderr, *capsys.readouterr()]
    files = [path for path in out.rglob("*") if path.is_file()]
    assert len(files) > 15
    assert not any(SECRET in each for each in texts)
    assert not any(SECRET.encode() in path.read_bytes() for path in files)
    shutil.copytree(out / "checkpoint-2", out / "checkpoint-9")
    sign_otherwise(out / "checkpoint-9")
    assert main(command) == 2
    assert "checkpoint-9/manifest.json.hmac-sha256 does not fit" in capsys.readouterr().err
