"""An NCCL group of one rank: its communicator exists before its first collective, and its memory is known."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from pipeloom.devices import device_of
from pipeloom.devices.communicators import Communicators, without_splits
from tests.gpu.gpt import CUDA


@pytest.fixture(params=[False, True], ids=["unbound", "bound"])
def default_group(request: pytest.FixtureRequest) -> Iterator[None]:
    """A default group of this process alone, with its device named to torch or not."""
    torch.cuda.set_device(CUDA)
    device = torch.device(CUDA) if request.param else None
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("default_group")
def test_a_communicator_is_made_at_once() -> None:
    device, made = device_of(torch.device(CUDA)), Communicators()
    with without_splits():
        group = dist.new_group([0])
    backend = group._get_backend(device.device)
    assert not backend._is_initialized()
    for _ in range(2):
        made.connect(group, device, lambda element: dist.all_reduce(element, group=group))
    assert backend._is_initialized()
    assert made.number == 1
    assert 0 < made.num_bytes < 8 << 30
    values = torch.arange(1000.0, device=CUDA)
    dist.all_reduce(values, group=group)
    assert torch.equal(values.cpu(), torch.arange(1000.0))
