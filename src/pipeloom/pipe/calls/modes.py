"""torch's modes that each thread has for itself: gradients, inference, autocast."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch

_DEVICES = ("cpu", "cuda")


class ThreadModes:
    """The modes of the thread that makes it, to be used in other threads."""

    def __init__(self) -> None:
        self.gradients = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        # Without the cache of autocast: the casts of a weight would belong to the graph of one micro-batch.
        self._autocast = [
            partial(torch.autocast, device, dtype=torch.get_autocast_dtype(device), cache_enabled=False)
            for device in _DEVICES
            if torch.is_autocast_enabled(device)
        ]

    @contextmanager
    def active(self, *, gradients: bool) -> Iterator[None]:
        """These modes, with gradients on or off."""
        with ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(gradients))
            for mode in self._autocast:
                stack.enter_context(mode())
            yield
