"""Times of kernels in one process: products of matrices, attention, elementwise operations, updates."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pipeloom.plan.local.measured import FORMATS
from pipeloom.split.profile import steady_timer

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_HEAD_WIDTH = 32
_SMALL = 64  # numbers, of a kernel that computes next to nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is measured.

    Attributes:
        products: sizes along each side of a product of matrices.
        tokens: lengths of sequences in attention.
        bytes: of elementwise operations.
        parameters: of updates.
        messages: bytes of messages and collectives.
        seconds: least time that is spent on one size.
    """

    products: tuple[int, ...] = (16, 64, 256, 1024)
    tokens: tuple[int, ...] = (32, 128, 512, 1024)
    bytes: tuple[int, ...] = tuple(1 << power for power in range(12, 25, 2))
    parameters: tuple[int, ...] = tuple(1 << power for power in range(12, 23, 2))
    messages: tuple[int, ...] = tuple(1 << power for power in range(8, 25, 4))
    seconds: float = 0.003


TINY = Sizes(products=(8, 16), tokens=(8, 16), bytes=(4096,), parameters=(4096,), messages=(256, 1024), seconds=0.0)


def seconds_of(call: Callable[[], object], least: float) -> float:
    """The median of runs after one for warm-up; at least 3 runs, for at least `least` seconds."""
    now, times = steady_timer(), list[float]()
    call()
    while len(times) < 3 or (math.fsum(times) < least and len(times) < 50):
        start = now()
        call()
        times.append(now() - start)
    return max(1e-9, median(times))


def measure_products(sizes: Sizes) -> dict[str, list[tuple[float, ...]]]:
    """Rows, columns, inner size and seconds of products, by number format."""
    found: dict[str, list[tuple[float, ...]]] = {}
    for kind in FORMATS:
        rows_of = found[kind] = []
        for rows, columns, inner in product(sizes.products, repeat=3):
            a = torch.randn(rows, inner).to(_DTYPES[kind])
            b = torch.randn(columns, inner).to(_DTYPES[kind])
            rows_of.append((rows, columns, inner, seconds_of(lambda a=a, b=b: F.linear(a, b), sizes.seconds)))  # type: ignore[misc]
    return found


def measure_attention(sizes: Sizes) -> Iterator[tuple[str, list[tuple[float, float]]]]:
    """Curves of fused causal attention by operations of the forward's two products."""
    for kind in FORMATS:
        forward, backward = list[tuple[float, float]](), list[tuple[float, float]]()
        for tokens in sizes.tokens:
            shape = 2, 4, tokens, _HEAD_WIDTH
            q, k, v = (torch.randn(shape).to(_DTYPES[kind]).requires_grad_() for _ in range(3))
            operations = 2.0 * math.prod(shape) * tokens  # half of the scores are masked
            seconds, back = [], []
            now = steady_timer()
            for _ in range(5):
                start = now()
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
                middle = now()
                torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
                seconds.append(middle - start)
                back.append(now() - middle)
            forward.append((operations, median(seconds)))
            backward.append((operations, median(back)))
        yield f"attention forward {kind}", forward
        yield f"attention backward {kind}", backward


def measure_elementwise(sizes: Sizes) -> list[tuple[float, float]]:
    """Bytes and seconds per kernel, the mean of an addition, a norm and an activation function."""
    found = []
    for size in sizes.bytes:
        x = torch.randn(max(1, size // 4 // 128), 128)
        kernels: Sequence[tuple[int, Callable[[], Tensor]]] = (
            (3, lambda x=x: x + x),  # type: ignore[misc]  # tensors that it reads and writes
            (2, lambda x=x: F.gelu(x)),  # type: ignore[misc]
            (2, lambda x=x: F.layer_norm(x, (128,))),  # type: ignore[misc]
            (2, lambda x=x: x.t().contiguous()),  # type: ignore[misc]
        )
        seconds = [seconds_of(call, sizes.seconds) for _, call in kernels]
        moved = sum(passes for passes, _ in kernels) * x.nbytes
        found.append((moved / len(kernels), sum(seconds) / len(kernels)))
    return found


def measure_kernel() -> float:
    """Seconds of a kernel on next to nothing, with its node of autograd."""
    x = torch.randn(_SMALL, requires_grad=True)
    count = 100

    def call() -> None:
        y = x
        for _ in range(count):
            y = y + y

    return seconds_of(call, 0.0) / count


def measure_update(sizes: Sizes, make: Callable[[list[torch.nn.Parameter]], Any]) -> list[tuple[float, float]]:
    """Parameters and seconds of the norm, the clipping and the update of one step; `make` makes the optimizer."""
    found = []
    for count in sizes.parameters:
        parameters = [torch.nn.Parameter(torch.randn(count // 8)) for _ in range(8)]
        optimizer = make(parameters)
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)

        def call(parameters: list[torch.nn.Parameter] = parameters, optimizer: Any = optimizer) -> None:
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            norm = torch.stack(torch._foreach_norm(gradients)).norm()
            torch._foreach_mul_(gradients, norm.clamp(max=1.0))
            optimizer.step()

        found.append((float(count), seconds_of(call, sizes.seconds)))
    return found
