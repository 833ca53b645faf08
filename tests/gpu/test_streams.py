"""Asynchronous schedules on a CUDA device: losses and weights of the same stream on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.schedules import pipedream, pipedream_2bw
from tests.cpu.test_streams import make_batches, make_stages
from tests.gpu.gpt import CUDA

SCHEDULES = {
    "stash": pipedream(num_ranks=3, num_microbatches=24, weights="stash"),
    "vertical": pipedream(num_ranks=3, num_microbatches=24, weights="vertical"),
    "2bw": pipedream_2bw(num_ranks=3, num_microbatches=24, microbatches_per_update=3),
}


def _train(name: str, device: str, transport: str) -> tuple[list[float], dict[str, Tensor]]:
    schedule = SCHEDULES[name]
    batches = [
        tuple(values.to(device) for values in batch)
        for batch in make_batches(schedule.num_microbatches // schedule.microbatches_per_update)
    ]
    stages = [stage.to(device) for stage in make_stages(3)]
    with pl.Pipeline(stages, schedule, loss_fn=nn.functional.mse_loss, transport=transport) as pipe:
        stream = pl.Stream(pipe, torch.optim.AdamW(pipe.parameters(), lr=0.01))
        losses = [update.loss for update in stream.run(batches)]
        versions = pl.check(schedule).weight_versions
        assert all(stream.peak_weight_versions[rank] == versions[rank] for rank in pipe.executor.local_ranks)
        return losses, {key: parameter.detach().cpu() for key, parameter in pipe.named_parameters()}


@pytest.mark.parametrize("transport", ["loopback", "threads"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_weights_and_losses_are_those_of_the_cpu(name: str, transport: str) -> None:
    losses, weights = _train(name, CUDA, transport)
    expected_losses, expected = _train(name, "cpu", "loopback")
    assert losses == pytest.approx(expected_losses, rel=1e-10)
    for key, weight in expected.items():
        torch.testing.assert_close(weights[key], weight, rtol=1e-9, atol=1e-12, msg=lambda m, k=key: f"{k} {m}")
