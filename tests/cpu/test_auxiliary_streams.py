"""Auxiliary losses and observed quantities in streams, beside one process with explicit copies of weights."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.errors import InputError
from tests.cpu import stream_reference
from tests.cpu.auxiliary_model import Counting, make_batch, make_model, mse
from tests.cpu.stream_reference import Rule
from tests.cpu.test_streams import OPTIMIZERS, make_schedule

NUM_BATCHES = 12


def _stages(count: int, layer: type[nn.Module]) -> list[nn.Module]:
    layers = list(make_model(layer=layer))
    return [nn.Sequential(*layers[s * 6 // count : (s + 1) * 6 // count]) for s in range(count)]


@pytest.mark.parametrize(
    ("rule", "transport"),
    [
        (Rule("stash", (1, 1, 1), 3), "loopback"),
        (Rule("2bw", (1, 1, 1), 3), "threads"),
        (Rule("vertical", (1, 1), 2), "threads"),
        (Rule("stash", (2, 1), 2), "loopback"),
    ],
)
def test_streams_train_auxiliary_losses(rule: Rule, transport: str) -> None:
    """Batches of 5, so micro-batches are uneven. Values are those with the weights that each micro-batch used."""
    layer = type(make_model()[0]) if max(rule.replicas) > 1 else Counting
    batches = [make_batch(5, seed=k) for k in range(NUM_BATCHES)]
    losses: list[float] = []
    weighted: list[float] = []

    def with_auxiliary(output: Tensor, targets: Tensor) -> Tensor:
        loss, auxiliary = mse(output, targets), found.total()
        found.losses.clear()
        losses.append(loss.item() * len(targets) / 5)
        weighted.append(auxiliary.item() * len(targets) / 5)
        return loss + auxiliary

    stages = _stages(len(rule.replicas), layer)
    with pl.auxiliary_losses() as found:
        expected = stream_reference.train(stages, rule, batches, with_auxiliary, OPTIMIZERS["momentum"])
    counts: Counter[str] = Counter()
    stages = _stages(len(rule.replicas), layer)
    with pl.Pipeline(stages, make_schedule(rule, NUM_BATCHES), loss_fn=mse, transport=transport) as pipe:
        updates = pl.Stream(pipe, OPTIMIZERS["momentum"](list(pipe.parameters()))).run(batches)
        for name, parameter in pipe.named_parameters():
            wanted = expected.parameters[name]
            torch.testing.assert_close(parameter, wanted, rtol=1e-11, atol=1e-12, msg=lambda m, n=name: f"{n} {m}")
        for number, update in enumerate(updates):
            held = slice(number * rule.per_update, (number + 1) * rule.per_update)
            assert update.loss == pytest.approx(sum(losses[held]), rel=1e-11)
            own = sum(loss.weighted for layers in update.auxiliary_losses.values() for loss in layers.values())
            assert own == pytest.approx(sum(weighted[held]), rel=1e-10)
            for found_in, quantities in update.observations.items():
                assert quantities["largest"].sum() == 5 * 6
                counts.update({f"{found_in} {k}": int(n) for k, n in enumerate(quantities["largest"])})
        for name, values in pipe.state_dict().items():
            if name.endswith("seen"):
                assert [counts[f"{name.removesuffix('.seen')} {k}"] for k in range(3)] == values.tolist()


def test_streams_refuse_listeners_that_would_see_a_part() -> None:
    rule = Rule("stash", (2, 1), 2)
    with (
        pl.Pipeline(_stages(2, Counting), make_schedule(rule, 4), loss_fn=mse) as pipe,
        pytest.raises(InputError, match=r"has Counting\.after_step and 2 replicas"),
    ):
        pl.Stream(pipe, OPTIMIZERS["sgd"](list(pipe.parameters())))
    rule = Rule("stash", (1, 1))
    with (
        pl.Pipeline(_stages(2, Counting), make_schedule(rule, 4), loss_fn=mse, recompute="full") as pipe,
        pytest.raises(InputError, match="recomputations would find other buffers"),
    ):
        pl.Stream(pipe, OPTIMIZERS["sgd"](list(pipe.parameters())))
