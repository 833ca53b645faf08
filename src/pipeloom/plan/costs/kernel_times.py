"""Seconds of single kernels of one device, from its data sheet. No torch here.

A product of matrices (rows x inner) (inner x columns) is computed in tiles of the result, one per multiprocessor at a
time. All multiprocessors take as long as the one with most tiles (wave quantization), and every tile has fixed work at
its beginning and end, as long as `_EDGE` more steps of the inner size:

    seconds = waves * 2 * tile rows * tile columns * (inner + _EDGE) / rate of a multiprocessor

with the tile shape, and the division of the inner size (split-K), that take least; smaller tiles have a lower rate.
A product takes at least the time of its memory traffic. What is computed per element takes the time of its memory
traffic. Each kernel takes `Device.launch_seconds` more.

    NVIDIA, Matrix Multiplication Background User's Guide (tile and wave quantization)
    Dao, arXiv:2307.08691, section 4.1 (rates of fused attention)

A device whose number of multiprocessors is unknown computes everything at the same rate. The times of a measured
machine (`pipeloom.plan.local`) come from its tables.
"""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

from pipeloom.plan.cluster import Cluster
from pipeloom.plan.local.measured import Rates

# Rows and columns of a tile of the result, and its rate: a smaller tile loads more bytes per operation.
_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (128, 64, 0.8), (64, 128, 0.8), (64, 64, 0.6))
_SPLITS = (1, 2, 4, 8)  # of the inner size
_EDGE = 86.0  # steps of the inner size; arXiv:2401.10241, table 6: W of 1,024 tokens at 7 % less than W of 6,144
_ALIGNMENT = 8  # 16-bit numbers in a load of 16 bytes, which tensor cores need
# Of the rate, since cuBLAS 11: padding 50,257 tokens to 50,304 makes GPT-2 about 25 % faster (A. Karpathy, 2023).
_UNALIGNED = 0.4
_ATTENTION_ROWS = 128  # queries per block of fused attention
# Rates of fused attention in comparison with products. A backward has 5 products, of which one is computed again.
_FUSED_FORWARD, _FUSED_BACKWARD = 0.68, 0.62
_BACKWARD_PRODUCTS = 2.5


@dataclass(frozen=True)
class KernelTimes:
    """Seconds of kernels.

    Attributes:
        cluster: whose device computes.
        element: bytes per number.
        launch_more: seconds per kernel that the software adds to those of the device.
    """

    cluster: Cluster
    element: int
    launch_more: float = 0.0

    @cached_property
    def launch(self) -> float:
        """Seconds per kernel beside its arithmetic and memory traffic."""
        return self.cluster.device.launch_seconds + self.launch_more

    @property
    def _format(self) -> str:
        return "bf16" if self.element == 2 else "fp32"

    @cached_property
    def rate(self) -> float:
        """Operations per second of large products."""
        return self.cluster.efficiency * self.cluster.device.peak(self.element)

    def product(self, rows: float, columns: float, inner: float, count: int = 1) -> float:
        """`count` products of the same sizes in one kernel."""
        if not rows or not count:
            return 0.0
        units, memory_rate, rates = self._figures
        if rates is not None:
            return count * rates.product_seconds(self._format, rows, columns, inner)
        if units is None:
            return 2 * rows * columns * inner * count / self.rate + self.launch
        return _product_seconds(rows, columns, inner, count, units, self.rate, memory_rate, self.element) + self.launch

    @cached_property
    def _figures(self) -> tuple[int | None, float, Rates | None]:
        """Multiprocessors and memory traffic of the device, and its tables."""
        return self.cluster.device.multiprocessors, self.cluster.memory_rate, self.cluster.rates

    def elementwise(self, num_bytes: float, kernels: float) -> float:
        """Kernels that read and write `num_bytes` together."""
        rates = self.cluster.rates
        if rates is not None:
            count = max(1.0, kernels)
            return count * rates.curve("elementwise", num_bytes / count)
        return num_bytes / self.cluster.memory_rate + kernels * self.launch

    def fused_attention(self, operations: float, blocks: float, *, backward: bool = False) -> float:
        """Attention in one kernel, whose scores stay on the multiprocessors.

        Args:
            operations: of the forward's two products, masked ones not counted.
            blocks: heads x queries of a process.
            backward: whether it is the backward.
        """
        units, rates = self.cluster.device.multiprocessors, self.cluster.rates
        if rates is not None:
            return rates.curve(f"attention {'backward' if backward else 'forward'} {self._format}", operations)
        if units is None:
            return (2 if backward else 1) * operations / self.rate + self.launch
        tiles = math.ceil(blocks / _ATTENTION_ROWS)
        idle = math.ceil(tiles / units) * units / tiles
        part = _BACKWARD_PRODUCTS / _FUSED_BACKWARD if backward else 1 / _FUSED_FORWARD
        return operations * part * idle / self.rate + self.launch


@lru_cache(maxsize=65536)
def _product_seconds(
    rows: float, columns: float, inner: float, count: int, units: int, rate: float, memory_rate: float, element: int
) -> float:
    """Seconds of `count` products in one kernel of a device with so many multiprocessors."""
    numbers = (rows * columns + rows * inner + inner * columns) * count
    aligned = columns % _ALIGNMENT == 0 and inner % _ALIGNMENT == 0
    each = rate * (1.0 if aligned else _UNALIGNED) / units
    return max(_tile_steps(rows, columns, inner, count, units) / each, element * numbers / memory_rate)


@lru_cache(maxsize=65536)
def _tile_steps(rows: float, columns: float, inner: float, count: int, units: int) -> float:
    """Operations of the multiprocessor that computes most."""
    least = math.inf
    for tall, wide, rate in _TILES:
        tiles = math.ceil(rows / tall) * math.ceil(columns / wide) * count
        for split in _SPLITS:
            waves = math.ceil(tiles * split / units)
            least = min(least, waves * 2 * tall * wide * (inner / split + _EDGE) / rate)
            if tiles * split >= units:
                break
    return least
