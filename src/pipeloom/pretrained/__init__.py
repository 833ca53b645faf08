"""Models of Hugging Face directories: read and written by the processes of a pipeline, each its own part.

files            the weight files of a directory, and their tensors
conversions      from tensors of files to tensors of a model
initial_values   values that are in no file
weights          reads the values of some modules
loading          `from_pretrained`
"""

from typing import TYPE_CHECKING

from pipeloom.common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from pipeloom.pretrained.loading import from_pretrained, load_weights

# Module -> its public names, loaded at first use.
_LAZY = {"pipeloom.pretrained.loading": "from_pretrained load_weights"}

__all__ = ["from_pretrained", "load_weights"]

__getattr__ = lazy_exports(__name__, _LAZY)
