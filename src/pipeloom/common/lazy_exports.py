"""Public names of a package, each imported when it is first used: importing the package then loads no torch."""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # importing typing would take most of the time that importing pipeloom takes
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any


def lazy_exports(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns the ``__getattr__`` of a package.

    Args:
        package: its ``__name__``.
        homes: for each public name, the full name of the module that defines it, or of the submodule that it names.
    """

    def __getattr__(name: str) -> Any:  # noqa: N807
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(home)
        return module if home == f"{package}.{name}" else getattr(module, name)

    return __getattr__
