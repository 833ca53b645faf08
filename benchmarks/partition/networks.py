"""VGG-16 and ResNet-50 by arithmetic: what each layer takes on a device, from its shapes and the device's data sheet.

A product takes as long as its arithmetic or its memory traffic, whichever is longer; everything else takes its memory
traffic. Values have 4 bytes, images 224 x 224 pixels. A backward is two products, for inputs and for weights; the first
layer has no gradient of its input.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeloom.plan.cluster import Cluster, parse_cluster
from pipeloom.plan.partition import LayerProfile, Profile

HERE = Path(__file__).parent
_VALUE_BYTES = 4
# Reads and writes of a whole tensor, forward and backward.
_BATCH_NORM = (3, 5)  # twice read and written; inputs and gradients twice read, gradients written
_RELU = (2, 3)  # read, written; outputs and gradients read, gradients written
_ADD = (3, 2)  # two read, one written; one gradient read and written for the other branch


def read_cluster(name: str) -> Cluster:
    """The cluster file "a" or "b" beside this one."""
    return parse_cluster((HERE / f"{name}.json").read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True)
class Work:
    """What a layer does to one image, forward and backward: seconds of a device, weights, and values of the output."""

    forward: float = 0.0
    backward: float = 0.0
    parameters: int = 0
    output: int = 0

    def then(self, other: Work) -> Work:
        """Both, one after the other."""
        return Work(
            self.forward + other.forward,
            self.backward + other.backward,
            self.parameters + other.parameters,
            other.output,
        )


class Device:
    """Turns shapes into `Work`; `batch` images at once."""

    def __init__(self, cluster: Cluster, batch: int) -> None:
        self.batch = batch
        self._operations = cluster.efficiency * cluster.device.operations_per_second
        self._traffic = cluster.efficiency * cluster.device.memory_bytes_per_second

    def product(self, macs: int, weights: int, inputs: int, outputs: int, *, first: bool = False) -> Work:
        """A convolution or a matrix: multiplications of one image, and values of its tensors."""
        values = weights + self.batch * (inputs + outputs)
        seconds = max(2 * self.batch * macs / self._operations, _VALUE_BYTES * values / self._traffic)
        return Work(seconds, seconds if first else 2 * seconds, weights, outputs)

    def passes(
        self, values: int, counts: tuple[float, float], *, parameters: int = 0, output: int | None = None
    ) -> Work:
        """Reads and writes of a tensor of so many values."""
        once = _VALUE_BYTES * self.batch * values / self._traffic
        return Work(counts[0] * once, counts[1] * once, parameters, values if output is None else output)

    def convolution(
        self, channels: tuple[int, int], kernel: int, size: tuple[int, int], *, first: bool = False
    ) -> Work:
        """Without bias; `channels` and `size` (of a side) are (in, out)."""
        weights = channels[0] * channels[1] * kernel**2
        outputs = channels[1] * size[1] ** 2
        return self.product(weights * size[1] ** 2, weights, channels[0] * size[0] ** 2, outputs, first=first)

    def linear(self, inputs: int, outputs: int) -> Work:
        """With bias."""
        work = self.product(inputs * outputs, inputs * outputs, inputs, outputs)
        return work.then(Work(parameters=outputs, output=outputs))

    def pool(self, inputs: int, outputs: int) -> Work:
        """Inputs read, outputs written; backward the other way."""
        part = 1 + outputs / inputs
        return self.passes(inputs, (part, part), output=outputs)

    def profile(self, layers: Iterator[tuple[str, Work]]) -> Profile:
        """For all images of the batch."""
        return Profile(
            tuple(
                LayerProfile(
                    name, w.forward, w.backward, _VALUE_BYTES * self.batch * w.output, _VALUE_BYTES * w.parameters
                )
                for name, w in layers
            )
        )


def vgg16(cluster: Cluster, batch: int) -> Profile:
    """13 convolutions with ReLU, 5 poolings, 3 matrices (arXiv:1409.1556, configuration D)."""
    device = Device(cluster, batch)

    def layers() -> Iterator[tuple[str, Work]]:
        channels, size = 3, 224
        for block, (width, depth) in enumerate(((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)), start=1):
            for number in range(1, depth + 1):
                work = device.convolution((channels, width), 3, (size, size), first=channels == 3)
                bias = Work(parameters=width, output=width * size**2)
                yield f"conv{block}_{number}", work.then(bias).then(device.passes(width * size**2, _RELU))
                channels = width
            size //= 2
            yield f"pool{block}", device.pool(4 * channels * size**2, channels * size**2)
        values = channels * size**2
        for number, width in ((6, 4096), (7, 4096), (8, 1000)):
            work = device.linear(values, width)
            yield f"fc{number}", work.then(device.passes(width, _RELU)) if number < 8 else work
            values = width

    return device.profile(layers())


def resnet50(cluster: Cluster, batch: int) -> Profile:
    """A convolution, 16 blocks of three, one matrix (arXiv:1512.03385), strides in the 3 x 3 convolutions."""
    device = Device(cluster, batch)

    def convolution(channels: tuple[int, int], kernel: int, size: tuple[int, int], *, relu: bool = True) -> Work:
        work = device.convolution(channels, kernel, size, first=channels[0] == 3)
        values = channels[1] * size[1] ** 2
        work = work.then(device.passes(values, _BATCH_NORM, parameters=2 * channels[1]))
        return work.then(device.passes(values, _RELU)) if relu else work

    def layers() -> Iterator[tuple[str, Work]]:
        yield "conv1", convolution((3, 64), 7, (224, 112))
        yield "pool1", device.pool(64 * 112**2, 64 * 56**2)
        channels, size = 64, 56
        for group, (width, depth) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), start=2):
            for number in range(1, depth + 1):
                after = size // 2 if number == 1 and group > 2 else size
                out = 4 * width
                work = convolution((channels, width), 1, (size, size))
                work = work.then(convolution((width, width), 3, (size, after)))
                work = work.then(convolution((width, out), 1, (after, after), relu=False))
                if number == 1:
                    work = work.then(convolution((channels, out), 1, (size, after), relu=False))
                values = out * after**2
                yield (
                    f"block{group}_{number}",
                    work.then(device.passes(values, _ADD)).then(device.passes(values, _RELU)),
                )
                channels, size = out, after
        yield "pool5", device.pool(channels * size**2, channels)
        yield "fc", device.linear(channels, 1000)

    return device.profile(layers())
