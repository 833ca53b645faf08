"""`Pipeline.records` has the times of the device."""

from __future__ import annotations

from itertools import pairwise
from time import perf_counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pipeloom as pl
from pipeloom.ir import Op
from tests.gpu.gpt import CUDA

WIDTH, ROWS = 4096, 4096  # a product takes a thousand times as long as its launch
_SLACK = 1e-4  # seconds: of events, and of the clocks of host and device


def _model(depth: int) -> nn.Sequential:
    with torch.device(CUDA):
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16) for _ in range(depth)))


def _run(num_ranks: int, transport: str) -> tuple[list, float, float, float]:
    """Records of a step, its seconds by events around it, and when it began and ended by the clock of the host."""
    schedule = pl.schedules.gpipe(num_ranks=num_ranks, num_microbatches=4)
    x = torch.randn(4 * ROWS, WIDTH, device=CUDA, dtype=torch.bfloat16)
    cut = [4 // num_ranks] * num_ranks
    with pl.Pipeline(_model(4), schedule, loss_fn=F.mse_loss, cut=cut, transport=transport) as pipe:
        for _ in range(3):
            pipe.step(x, x)
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start = perf_counter()
        begin.record()
        pipe.step(x, x)
        end.record()
        torch.cuda.synchronize()
        stop = perf_counter()
        return pipe.records, begin.elapsed_time(end) / 1000, start, stop


def test_spans_add_up_to_what_events_around_the_step_say() -> None:
    ((_, rows),), seconds, start, stop = _run(1, "loopback")
    total = sum(end - begin for _, begin, end in rows)
    print(f"spans {total * 1e3:.3f} ms, events {seconds * 1e3:.3f} ms, host {(stop - start) * 1e3:.3f} ms")
    assert 0.5 * seconds < total < seconds + _SLACK
    backward = {action.microbatch: end - begin for action, begin, end in rows if action.op is Op.B}
    forward = {action.microbatch: end - begin for action, begin, end in rows if action.op is Op.F}
    assert all(backward[b] > forward[b] > 0 for b in range(1, 3)), (forward, backward)


@pytest.mark.parametrize("transport", ["loopback", "threads"])
def test_spans_of_a_rank_are_in_order_and_those_of_others_wait_for_them(transport: str) -> None:
    records, _, start, stop = _run(2, transport)
    ends = {}
    for rank, rows in records:
        assert rows == sorted(rows, key=lambda row: row[1]), (rank, rows)
        for (_, _, end), (action, begin, _) in pairwise(rows):
            assert end <= begin + _SLACK, (rank, action)
        assert start - 0.05 < rows[0][1] <= rows[-1][2] < stop + 0.05, (start, stop, rows)
        ends |= {action: (begin, end) for action, begin, end in rows}
    for action, (begin, _) in ends.items():
        before = ends.get(action._replace(stage=action.stage - 1)) if action.op is Op.F else None
        assert before is None or before[1] <= begin + _SLACK, action
