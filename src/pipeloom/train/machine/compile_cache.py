"""The cache directory of torch.compile, which torch makes even where nothing is compiled."""

import getpass
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def without_empty_cache() -> Iterator[None]:
    """After the block, remove the cache directory if it is new and empty. No torch.

    Where torchrun has started this process again, an earlier process of the run may have made it.
    """
    path = _cache_dir()
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    existed = path is None or (path.exists() and not again)
    try:
        yield
    finally:
        if path is not None and not existed:
            with suppress(OSError):  # it has files, or was not made
                path.rmdir()


def _cache_dir() -> Path | None:
    """The directory that torch takes; None: it has a name that only torch knows."""
    if (given := os.environ.get("TORCHINDUCTOR_CACHE_DIR")) is not None:
        return Path(given)
    try:
        user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    except (KeyError, OSError):
        return None
    return Path(tempfile.gettempdir()) / f"torchinductor_{user}"
