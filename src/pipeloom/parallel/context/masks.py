# ruff: noqa: N803  # shapes are part of the names
"""Which keys a query attends to: causal order, a window, padding, documents. `Mask` makes the mask of any block.

Shapes: B batch, S tokens of a whole sequence, Q queries and T keys of a block.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class Mask:
    """Which keys of whole sequences a query attends to.

    Args:
        causal: not to later keys.
        window: not to keys `window` or more positions before; None: no such limit.
        kept: boolean [B, S], False for keys that no query attends to (padding); None: there are none.
        documents: [B, S]; only to keys with the same number; None: one document.
    """

    causal: bool
    window: int | None = None
    kept: Tensor | None = None
    documents: Tensor | None = None
    _kinds: dict[Hashable, bool | None] = field(default_factory=dict)

    @property
    def is_simple(self) -> bool:
        """Whether nothing but the causal order masks."""
        return self.window is None and self.kept is None and self.documents is None

    def block(self, queries_Q: Tensor, keys_T: Tensor) -> Tensor:
        """Boolean [B or 1, 1, Q, T], True where a query attends to a key.

        Args:
            queries_Q, keys_T: positions.
        """
        ahead_QT = queries_Q[:, None] - keys_T[None]
        allowed = torch.ones_like(ahead_QT, dtype=torch.bool)
        if self.causal:
            allowed &= ahead_QT >= 0
        if self.window is not None:
            allowed &= ahead_QT < self.window
        allowed = allowed[None]
        if self.documents is not None:
            same = self.documents[:, queries_Q].unsqueeze(2) == self.documents[:, keys_T].unsqueeze(1)
            allowed = allowed & same
        if self.kept is not None:
            allowed = allowed & self.kept[:, None, keys_T]
        return allowed.unsqueeze(1)

    def needed(self, key: Hashable, queries_Q: Tensor, keys_T: Tensor, *, triangle: bool) -> bool | Tensor:
        """The mask of a block; True: all pairs attend, or those of the triangle; False: none.

        Args:
            key: names the block; whether it needs a mask is computed once.
            triangle: whether the kernel masks later keys itself.
        """
        if self.is_simple:
            return True
        known = self._kinds.get(key)
        if key in self._kinds and known is not None:
            return known
        mask = self.block(queries_Q, keys_T)
        if key not in self._kinds:
            pairs = Mask(True).block(queries_Q, keys_T) if triangle else None
            whole = bool((mask == pairs).all()) if pairs is not None else bool(mask.all())
            self._kinds[key] = True if whole else None if bool(mask.any()) else False
            if self._kinds[key] is not None:
                return bool(self._kinds[key])
        return mask
