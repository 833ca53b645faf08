"""Emulated devices: the real program of a layout in real processes, whose arithmetic and collectives take given times.

The numbers are tiny and computed for real. A process keeps the time at which its device would be done: every matrix
product adds its operations over the device's rate, every collective begins when the last member's device gets there and
adds its time. As with a real accelerator, the process runs ahead of its device; it waits for the device before it sends
a message to another stage, and at the end of a step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import pipeloom as pl
from pipeloom.parallel.axis import Axis, Combine
from pipeloom.plan.costs.link_rate import LinkRate
from pipeloom.plan.stage_times import messages_in_turn
from pipeloom.transport.interface import Channel, Incoming, Message, Outgoing, Transport
from pipeloom.transport.values import Layout

_aten: Any = torch.ops.aten


class Device(TorchDispatchMode):
    """The device of this process. While it is entered, operators of torch take their time on it.

    Args:
        operations_per_second: of matrix products and attention. Other operators take no time.
        link: to the other devices of the stage; it carries one collective at a time.

    Attributes:
        done: when the device is done with what it was given (time.monotonic).
        link_done: when its link is.
    """

    def __init__(self, operations_per_second: float, link: LinkRate) -> None:
        super().__init__()
        self._rate, self._link = operations_per_second, link
        self.done = self.link_done = 0.0

    def begin(self, start: float | None = None) -> None:
        """What the device is given from here on starts at `start` (default: now), or when it is done."""
        self.done = max(self.done, time.monotonic() if start is None else start)

    def finish(self) -> None:
        """Wait until the device is done."""
        left = self.done - time.monotonic()
        if left > 0:
            time.sleep(left)

    def transfer_seconds(self, num_bytes: int, messages: int) -> float:
        """Seconds of a collective."""
        rate = self._link.bytes_per_second
        return messages * self._link.latency_seconds + (0.0 if rate is None else num_bytes / rate)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.done += operations(func, args, kwargs or {}) / self._rate
        return found


def operations(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> float:
    """Multiplications and additions of an operator; causal attention computes half of its scores."""
    packet = func.overloadpacket
    if packet in (_aten.mm, _aten.bmm):
        return 2.0 * args[0].numel() * args[1].shape[-1]
    if packet in (_aten.addmm, _aten.addmm_, _aten.baddbmm):
        return 2.0 * args[1].numel() * args[2].shape[-1]
    forward = packet is _aten._scaled_dot_product_flash_attention_for_cpu
    if forward or packet is _aten._scaled_dot_product_flash_attention_for_cpu_backward:
        query, key = args[:2] if forward else args[1:3]
        place = 4 if forward else 7
        causal = args[place] if len(args) > place else kwargs.get("is_causal", False)
        scores = math.prod(query.shape[:-1]) * key.shape[-2] * query.shape[-1]
        return (4.0 if forward else 8.0) * scores * (0.5 if causal else 1.0)
    return 0.0


class EmulatedAxis(Axis):
    """An axis whose collectives take their time on the members' devices and links.

    Args:
        inner: exchanges the values.
        clocks: exchanges the times of devices, past values that are on their way.
        device: of this process.
    """

    def __init__(self, inner: Axis, clocks: Axis, device: Device) -> None:
        super().__init__(inner.name, inner.degree, inner.index, inner.meter)
        self._inner, self._clocks, self._device = inner, clocks, device

    def _begin(self, collective: str, num_bytes: int) -> Callable[[], None]:
        """Begin a collective once all members' devices and links are there. Returns what waits for it."""
        device = self._device
        here = torch.tensor([max(device.done, device.link_done)], dtype=torch.float64)
        start = float(self._clocks.all_reduce(here, "max"))
        end = start + device.transfer_seconds(num_bytes, messages_in_turn(collective, self.degree))
        device.link_done = end

        def wait() -> None:
            device.done = max(device.done, end)

        return wait

    def _all_reduce(self, x: Tensor, combine: Combine) -> Tensor:
        self._begin("all_reduce", 2 * x.nbytes * (self.degree - 1) // self.degree)()
        return self._inner._all_reduce(x, combine)

    def _all_gather(self, x: Tensor) -> list[Tensor]:
        self._begin("all_gather", x.nbytes * (self.degree - 1))()
        return self._inner._all_gather(x)

    def _reduce_scatter(self, pieces: Sequence[Tensor]) -> Tensor:
        whole = sum(piece.nbytes for piece in pieces)
        self._begin("reduce_scatter", whole * (self.degree - 1) // self.degree)()
        return self._inner._reduce_scatter(pieces)

    def _all_to_all(self, pieces: list[Tensor], arriving: Sequence[Sequence[int]] | None) -> list[Tensor]:
        self._begin("all_to_all", sum(p.nbytes for c, p in enumerate(pieces) if c != self.index))()
        return self._inner._all_to_all(pieces, arriving)

    def _broadcast(self, x: Tensor, source: int) -> Callable[[], Tensor]:
        wait, finish = self._begin("broadcast", x.nbytes), self._inner._broadcast(x, source)

        def finished() -> Tensor:
            wait()
            return finish()

        return finished

    def _reduce(self, x: Tensor, target: int) -> Tensor | None:
        self._begin("reduce", x.nbytes)()
        return self._inner._reduce(x, target)

    def _shift(self, tensors: list[Tensor], by: int) -> Callable[[], list[Tensor]]:
        wait, finish = self._begin("shift", sum(t.nbytes for t in tensors)), self._inner._shift(tensors, by)

        def finished() -> list[Tensor]:
            wait()
            return finish()

        return finished


class LocalAxis(Axis):
    """An axis that sends nothing: results have the right shapes, so that computations take as long as they do."""

    def _all_reduce(self, x: Tensor, combine: Combine) -> Tensor:
        return x.clone()

    def _all_gather(self, x: Tensor) -> list[Tensor]:
        return [x] * self.degree

    def _reduce_scatter(self, pieces: Sequence[Tensor]) -> Tensor:
        return pieces[self.index].contiguous()

    def _all_to_all(self, pieces: list[Tensor], arriving: Sequence[Sequence[int]] | None) -> list[Tensor]:
        return pieces

    def _broadcast(self, x: Tensor, source: int) -> Callable[[], Tensor]:
        return lambda: x

    def _reduce(self, x: Tensor, target: int) -> Tensor | None:
        return x if self.index == target else None

    def _shift(self, tensors: list[Tensor], by: int) -> Callable[[], list[Tensor]]:
        return lambda: tensors


class OtherAxes(pl.Mesh):
    """A mesh whose axes inside a stage are made by `wrap` from the real ones and their members."""

    def __init__(self, wrap: Callable[[Axis, Sequence[int]], Axis], **degrees: int) -> None:
        super().__init__(**degrees)
        self._wrap = wrap

    def _connect(self, name: str, line: tuple[int, ...]) -> Axis:
        return self._wrap(super()._connect(name, line), line)


class _Outgoing(Outgoing):
    def __init__(self, inner: Outgoing, device: Device) -> None:
        self._inner, self._device = inner, device

    def send(self, layout: Layout, tensors: Sequence[Tensor], call: int = 0) -> None:
        self._device.finish()
        self._inner.send(layout, tensors, call)


class _Incoming(Incoming):
    def __init__(self, inner: Incoming, device: Device) -> None:
        self._inner, self._device = inner, device

    def ready(self) -> bool:
        return self._inner.ready()

    def receive(self) -> Message:
        message = self._inner.receive()
        self._device.begin()
        return message


class DeviceTransport(Transport):
    """`inner`, whose messages leave when the device is done, and which the device computes with once they are there."""

    def __init__(self, inner: Transport, device: Device) -> None:
        self._inner, self._device = inner, device

    def open(self, channels: Iterable[Channel]) -> None:
        self._inner.open(channels)

    def outgoing(self, channel: Channel) -> Outgoing:
        return _Outgoing(self._inner.outgoing(channel), self._device)

    def incoming(self, channel: Channel) -> Incoming:
        return _Incoming(self._inner.incoming(channel), self._device)

    def end_step(self) -> None:
        self._inner.end_step()

    def close(self) -> None:
        self._inner.close()
