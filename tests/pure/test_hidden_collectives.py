"""What collectives hide behind computations, against a device and a link stepped through in the order of the code."""

from __future__ import annotations

import pytest

from pipeloom.plan.hidden_collectives import RingSeconds, passes_hidden, products_hidden


class Clock:
    """A device, and its link with one collective at a time."""

    def __init__(self) -> None:
        self.device = self.link = self.busy = 0.0

    def compute(self, seconds: float) -> None:
        self.device += seconds
        self.busy += seconds

    def begin(self, seconds: float) -> float:
        """Begin a collective; when it ends."""
        self.link = max(self.device, self.link) + seconds
        self.busy += seconds
        return self.link

    def wait(self, end: float) -> None:
        self.device = max(self.device, end)

    @property
    def hidden(self) -> float:
        return self.busy - self.device


TIMES = [(1.0, 0.25, 0.5), (1.0, 3.0, 0.5), (1.0, 0.75, 4.0), (1.0, 2.0, 2.0), (0.0, 1.0, 1.0), (1.0, 0.0, 0.0)]


@pytest.mark.parametrize("hops", [2, 3, 4, 8])
@pytest.mark.parametrize(("compute", "keys", "gradients"), TIMES)
def test_ring_attention(hops: int, compute: float, keys: float, gradients: float) -> None:
    ring = RingSeconds(hops, compute, keys, gradients)
    forward, backward = Clock(), Clock()
    for hop in range(hops):
        end = forward.begin(keys) if hop < hops - 1 else 0.0
        forward.compute(compute)
        forward.wait(end)
    assert ring.forward() == pytest.approx(forward.hidden)
    travelling = 0.0
    for hop in range(hops):
        end = backward.begin(keys) if hop < hops - 1 else 0.0
        backward.compute(2 * compute)
        if hop > 0:
            backward.wait(travelling)
            travelling = backward.begin(gradients)
        backward.wait(end)
    backward.wait(travelling)
    assert ring.backward() == pytest.approx(backward.hidden)


@pytest.mark.parametrize("hops", [2, 3, 8])
@pytest.mark.parametrize(("compute", "shift", "_"), TIMES)
def test_ring_self_attention(hops: int, compute: float, shift: float, _: float) -> None:
    clock = Clock()
    for _pass in range(2):
        for hop in range(hops):
            end = clock.begin(shift) if hop < hops - 1 else 0.0
            clock.compute(compute / hops)
            clock.wait(end)
    assert passes_hidden(hops, compute, shift) == pytest.approx(clock.hidden)


@pytest.mark.parametrize("side", [2, 3, 4])
@pytest.mark.parametrize(("compute", "broadcast", "reduce"), TIMES)
def test_products_on_a_grid(side: int, compute: float, broadcast: float, reduce: float) -> None:
    forward, backward = Clock(), Clock()
    for clock, sums in ((forward, 0.0), (backward, reduce)):
        waiting = clock.begin(broadcast / side)
        for step in range(side):
            arriving = waiting
            if step < side - 1:
                waiting = clock.begin(broadcast / side)
            clock.wait(arriving)
            clock.compute(compute / side)
            clock.wait(clock.begin(sums) if sums else 0.0)
        assert products_hidden(side, compute, broadcast) == pytest.approx(clock.hidden)
