"""`SharedDraws`: what a model's forward draws at random between its parts, drawn alike on every stage.

Every stage runs the forward from its beginning, so noise that is drawn there would differ between stages: one would add
noise to the inputs, and another compare the output with other noise. A seed per micro-batch travels along instead, and
each draw has a generator state of its own, by the module that draws and by the number of its draws.
"""

import hashlib
import threading
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

_DROPOUTS = frozenset(
    ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "feature_dropout")
)
_DRAWS = _DROPOUTS | frozenset(
    (
        *("rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson", "binomial"),
        *("rand_like", "randn_like", "randint_like", "gumbel_softmax", "rrelu", "rrelu_"),
        *("normal_", "uniform_", "random_", "bernoulli_", "exponential_", "cauchy_", "geometric_", "log_normal_"),
    )
)
_lock = threading.Lock()  # the generator is of the process


class SharedDraws(TorchFunctionMode):
    """Inside the block, functions that draw use states made from a seed.

    Args:
        seed: of the micro-batch; None: the first draw makes one with torch's generator.

    Attributes:
        seed: of the micro-batch, or None as long as nothing was drawn.
        quiet: whether functions draw as always: inside of parts.
        scope: name of the module that draws; empty: the forward of the model.
    """

    def __init__(self, seed: int | None) -> None:
        super().__init__()
        self.seed, self.quiet, self.scope = seed, False, ""
        self._numbers: dict[str, int] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        settings = kwargs or {}
        name = getattr(func, "__name__", "")
        if self.quiet or name not in _DRAWS or settings.get("generator") is not None:
            return func(*args, **settings)
        if name in _DROPOUTS and not settings.get("training", args[2] if len(args) > 2 else True):
            return func(*args, **settings)
        if self.seed is None:
            self.seed = int(torch.randint(2**62, ()))
        number = self._numbers[self.scope] = self._numbers.get(self.scope, -1) + 1
        digest = hashlib.sha256(f"{self.seed}|{self.scope}|{number}".encode()).digest()
        leaves = [leaf for leaf in tree_leaves((args, settings)) if isinstance(leaf, Tensor | torch.device)]
        devices = {leaf.device if isinstance(leaf, Tensor) else leaf for leaf in leaves}
        with _lock, torch.random.fork_rng(devices=[device for device in devices if device.type == "cuda"]):
            torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            return func(*args, **settings)
