"""`pipeloom train` on a Ray cluster.

workers     the function that each of Ray's workers runs
run_files   what a run writes while it runs

Importing this package imports nothing of Ray; using its name does.
"""

from typing import TYPE_CHECKING

from pipeloom.common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from pipeloom.integrations.ray.workers import train_loop

_LAZY = {"pipeloom.integrations.ray.workers": "train_loop"}

__all__ = ["train_loop"]

__getattr__ = lazy_exports(__name__, _LAZY)
