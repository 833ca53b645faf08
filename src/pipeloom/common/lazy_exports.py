"""Lazy imports of a package's public names, so that importing the package does not import torch."""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # importing `typing` would take most of pipeloom's import time
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any


def lazy_exports(package: str, exports: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for a package.

    Args:
        package: the package's ``__name__``.
        exports: full name of a module -> its public names, with blanks between; the package itself -> its submodules.
    """
    homes = {name: module for module, names in exports.items() for name in names.split()}

    def __getattr__(name: str) -> Any:  # noqa: N807
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if home == package:
            return importlib.import_module(f"{package}.{name}")
        return getattr(importlib.import_module(home), name)

    return __getattr__
