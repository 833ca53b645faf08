"""`SharedDraws`: what a model's forward draws at random between its parts, drawn alike on every stage.

Every stage runs the forward from its beginning, so noise that is drawn there would differ between stages: one would add
noise to the inputs, and another compare the output with other noise. A seed per micro-batch travels along instead, and
each draw of torch has a generator state of its own, by the module that draws and by the number of its draws.

Python's and numpy's functions cannot be intercepted. Their generators get states made from the seed wherever no part of
the stage runs, and the process's own states inside of parts. That takes a millisecond, and what is drawn may lead to
branches: only forwards that explore do it, and a forward that draws so explores each time.
"""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from pipeloom.common.random_states import RandomStates, thread
from pipeloom.errors import SplitError
from pipeloom.split.planned.tracking.origins import DRAWN, IN_UNIT, Origins

_DROPOUTS = frozenset(
    ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "feature_dropout")
)
_DRAWS = _DROPOUTS | frozenset(
    (
        *("rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson", "binomial"),
        *("rand_like", "randn_like", "randint_like", "gumbel_softmax", "rrelu", "rrelu_", "native_dropout"),
        *("_standard_gamma", "_sample_dirichlet", "scaled_dot_product_attention", "multi_head_attention_forward"),
        *("normal_", "uniform_", "random_", "bernoulli_", "exponential_", "cauchy_", "geometric_", "log_normal_"),
    )
)
_lock = threading.Lock()  # the generator is of the process


class SharedDraws(TorchFunctionMode):
    """Inside the block, functions that draw use states made from a seed.

    Args:
        seed: of the micro-batch; None: the first draw makes one with torch's generator.
        origins: gets what is drawn, in a forward that explores; None: it does not.
        is_alone: whether the model has one stage.

    Attributes:
        seed: of the micro-batch, or None as long as nothing was drawn.
        others: whether Python's or numpy's generators have drawn, for the forward or for another thread meanwhile.
    """

    def __init__(self, seed: int | None, origins: Origins | None, *, is_alone: bool = False) -> None:
        super().__init__()
        self._is_alone = is_alone
        self.seed, self.others = seed, False
        self._origins = origins
        self._quiet, self._scope = False, ""  # inside of parts; the module that draws, empty for the model's forward
        self._numbers: dict[str, int] = {}
        self._next_seed = 0
        self._streams: dict[str, RandomStates] = {}  # of Python's and numpy's generators, by scope
        self._states: tuple[RandomStates, RandomStates] | None = None  # the process's, and those in their place

    def __enter__(self) -> "SharedDraws":
        super().__enter__()  # type: ignore[no-untyped-call]
        if self._origins is not None:
            with _lock:
                before = torch.get_rng_state()
                self._next_seed = self.seed or _made_seed()
                torch.set_rng_state(before)
            self._share()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._give_back()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside the block, functions draw as always: inside of parts."""
        self._quiet = True
        shares = self._give_back()
        try:
            yield
        finally:
            self._quiet = False
            if shares:
                self._share()

    @contextmanager
    def within(self, module: str) -> Iterator[None]:
        """Inside the block, the module with this name draws."""
        shares = self._give_back()
        self._scope = module
        if shares:
            self._share()
        try:
            yield
        finally:
            self._give_back()
            self._scope = ""
            if shares:
                self._share()

    def _share(self) -> None:
        """Set Python's and numpy's generators to states that all stages have here."""
        own = RandomStates.now()
        states = own if thread.shares_process else self._streams.get(self._scope)
        if states is None:
            states = RandomStates.seeded(_hashed(self._next_seed, self._scope, "others"))
        if not thread.shares_process:
            states.restore()
        self._states = own, states

    def _give_back(self) -> bool:
        """Restore the process's own states, if others are in their place; returns whether they were."""
        if self._states is None:
            return False
        (own, shared), self._states = self._states, None
        now = RandomStates.now()
        if now != shared and thread.shares_process:
            raise SplitError(
                "the forward, or another thread meanwhile, draws from Python's or numpy's random generator between its "
                "layers, and stages that are threads share it: they would draw different numbers. Use torch's "
                "functions, transport 'loopback', or processes."
            )
        if now != shared:
            self.others = True
            self._take_seed()
        self._streams[self._scope] = now
        if not thread.shares_process:
            own.restore()
        return True

    def _take_seed(self) -> int:
        if self.seed is None:
            made = _made_seed()  # so that the next forward gets another one
            self.seed = self._next_seed or made
        return self.seed

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        settings = kwargs or {}
        name = getattr(func, "__name__", "").partition(".")[0]  # without the name of an overload
        if self._quiet or name not in _DRAWS:
            return func(*args, **settings)
        if settings.get("generator") is not None:
            if self._origins is None or self._is_alone:
                return func(*args, **settings)
            raise SplitError(
                f"the forward draws between its layers with a generator of its own (torch.{name}, generator=): every "
                "stage would draw from it. Leave generator out, and all stages draw alike, or draw in a layer."
            )
        if name in _DROPOUTS and not settings.get("training", args[2] if len(args) > 2 else True):
            return func(*args, **settings)
        seed = self._take_seed()
        number = self._numbers[self._scope] = self._numbers.get(self._scope, -1) + 1
        leaves = [leaf for leaf in tree_leaves((args, settings)) if isinstance(leaf, Tensor | torch.device)]
        devices = {leaf.device if isinstance(leaf, Tensor) else leaf for leaf in leaves}
        with _lock, torch.random.fork_rng(devices=[device for device in devices if device.type == "cuda"]):
            torch.manual_seed(_hashed(seed, self._scope, number))
            drawn = func(*args, **settings)
        if self._origins is not None:
            self._origins.mark(drawn, DRAWN | (IN_UNIT if func is torch.rand else 0))
        return drawn


def _made_seed() -> int:
    with torch._C.DisableTorchFunction():
        return int(torch.randint(1, 2**62, ()))


def _hashed(seed: int, scope: str, number: int | str) -> int:
    digest = hashlib.sha256(f"{seed}|{scope}|{number}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
