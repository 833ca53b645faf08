"""Keys and values of earlier tokens on one stage of a model of transformers.

A stage has a cache of its own, of which its layers fill their own entries. Code around the layers asks the cache for
the number of tokens, often of the first layer, which another stage may hold. After each forward, entries of other
stages therefore take up as many tokens as those of this one: empty keys of one head and one element.
"""

from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor


def lengths_of(cache: Any) -> list[int]:
    """The number of tokens in each layer of a cache."""
    return [] if cache is None else [int(layer.get_seq_length()) for layer in cache.layers]


def fill_others(cache: Any, before: list[int], ids: Tensor | None) -> None:
    """Let layers that the last forward did not extend take up the tokens of `ids` [B, S].

    Args:
        cache: of transformers; None: nothing to do.
        before: `lengths_of` before the forward.
    """
    if cache is None or ids is None:
        return
    empty = torch.zeros(ids.shape[0], 1, ids.shape[1], 1, device=ids.device)
    for layer, length, old in zip_longest(cache.layers, lengths_of(cache), before, fillvalue=0):
        if length == old:
            entry: Any = layer
            entry.update(empty, empty)
