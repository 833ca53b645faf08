"""Lazy imports of a package's public names, so that importing the package does not import torch."""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # importing `typing` would take most of pipeloom's import time
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any


def lazy_exports(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for a package.

    Args:
        package: the package's ``__name__``.
        homes: public name -> full name of the module that defines it, or of the submodule with that name.
    """

    def __getattr__(name: str) -> Any:  # noqa: N807
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(home)
        return module if home == f"{package}.{name}" else getattr(module, name)

    return __getattr__
