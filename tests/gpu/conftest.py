"""Tests on a CUDA device. Without one every test is skipped, and says why."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# cuBLAS is bitwise reproducible on several streams with workspaces of fixed sizes; read before its first call.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
_FOLDER = Path(__file__).parent


def _missing() -> str | None:
    """Why there is no device; None: there is one."""
    import torch

    if torch.version.cuda is None:
        return f"no CUDA device: torch {torch.__version__} is built without CUDA"
    return None if torch.cuda.is_available() else f"no CUDA device: torch {torch.__version__} finds none"


@pytest.fixture
def same_bits() -> Iterator[None]:
    """Operations add in the same order in every call: the backward of fused attention does not, so it is not fused."""
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def no_compile_workers() -> Iterator[None]:
    """The processes that compile in parallel end with the test."""
    yield
    from torch._inductor.async_compile import shutdown_compile_workers

    shutdown_compile_workers()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    own = [item for item in items if _FOLDER in item.path.parents]
    reason = _missing() if own else None
    if reason is not None:
        for item in own:
            item.add_marker(pytest.mark.skip(reason=reason))
