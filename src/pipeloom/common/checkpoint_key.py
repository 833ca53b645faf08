"""Signatures of checkpoints: HMAC-SHA256 of the manifest, which has the hashes of all other files. Needs no torch.

``manifest.json.hmac-sha256`` has the code in hexadecimal. ``openssl dgst -sha256 -hmac KEY manifest.json`` computes the
same one.
"""

import hashlib
import hmac
from pathlib import Path
from typing import Self

from pipeloom.errors import CheckpointError, InputError

SIGNATURE_NAME = "manifest.json.hmac-sha256"
_LEAST_BYTES = 16
_MOST_BYTES = 1 << 16


class CheckpointKey:
    """A key that signs checkpoints and checks their signatures. It is in no text that pipeloom writes.

    Args:
        path: the file that has it, for messages.
        secret: at least 16 bytes.

    Raises:
        InputError: `secret` is too short.
    """

    def __init__(self, path: Path, secret: bytes) -> None:
        if len(secret) < _LEAST_BYTES:
            raise InputError(
                f"checkpoint_key_file={path}: has {len(secret)} bytes, and a key must have at least {_LEAST_BYTES}. "
                f"Make one with: openssl rand -hex 32 > {path}"
            )
        self.path, self._secret = path, secret

    @classmethod
    def read(cls, path: str | Path | None) -> Self | None:
        """The key of a file, without the end of its last line; None without a file.

        Raises:
            InputError: the file cannot be read, or is too short or too long.
        """
        if path is None:
            return None
        try:
            with open(path, "rb") as file:
                content = file.read(_MOST_BYTES + 1)
        except OSError as error:
            raise InputError(f"checkpoint_key_file={path}: {error.strerror}. Name a readable file.") from error
        if len(content) > _MOST_BYTES:
            raise InputError(f"checkpoint_key_file={path}: has more than {_MOST_BYTES} bytes. Name the file of a key.")
        return cls(Path(path), content.rstrip(b"\r\n"))

    def sign(self, manifest: bytes) -> bytes:
        """The content of the signature file."""
        return hmac.new(self._secret, manifest, hashlib.sha256).hexdigest().encode() + b"\n"

    def check(self, checkpoint: Path, manifest: bytes) -> None:
        """Compare the signature of a checkpoint, in constant time.

        Raises:
            CheckpointError: it is missing, or of another manifest or key.
        """
        path = checkpoint / SIGNATURE_NAME
        try:
            with open(path, "rb") as file:
                found = file.read(1024)
        except FileNotFoundError:
            raise CheckpointError(
                f"{checkpoint} is not signed: it has no {SIGNATURE_NAME}, and checkpoint_key_file={self.path} asks for "
                "one. Use a checkpoint that was saved with this key, or remove checkpoint_key_file if you trust it."
            ) from None
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be read ({error.strerror}). Check the file, or use another checkpoint."
            ) from error
        if not hmac.compare_digest(found, self.sign(manifest)):
            raise CheckpointError(
                f"{path} does not fit the manifest and the key in {self.path}: the checkpoint was changed after it was "
                "saved, or signed with another key. Use the key it was saved with, or another checkpoint."
            )
