"""Batches as loaders and tokenizers make them: all forms give the same loss, others are refused with the fix."""

from __future__ import annotations

import copy
from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, TensorDataset

import pipeloom as pl
from pipeloom.errors import InputError

Pair = namedtuple("Pair", "x y")
SCHEDULE = pl.schedules.build("1f1b", num_ranks=2, num_microbatches=4)


@dataclass
class Sample:
    x: Tensor
    y: Tensor


class Reads(nn.Linear):
    """Takes a tensor, or finds it in a batch."""

    def forward(self, given: Any) -> Tensor:
        while not isinstance(given, Tensor):
            given = given["x"] if isinstance(given, dict) else given[0]
        return super().forward(given)


torch.manual_seed(0)
_MODEL = nn.Sequential(Reads(4, 4), nn.Tanh(), nn.Linear(4, 3))


def make_model() -> nn.Sequential:
    return copy.deepcopy(_MODEL)  # threads share a generator


def make_batch(samples: int = 10) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(samples)
    return torch.randn(samples, 4, generator=generator), torch.randint(0, 3, (samples,), generator=generator)


def loss_fn(output: Tensor, target: Any) -> Tensor:
    while not isinstance(target, Tensor):
        target = target["y"] if isinstance(target, dict) else target[0]
    return F.cross_entropy(output, target)


X, Y = make_batch()
ENDLESS: dict[str, Any] = {"x": X}
ENDLESS["again"] = ENDLESS


@pytest.mark.parametrize(
    ("inputs", "targets"),
    [
        ({"x": X, "mask": None, "ids": torch.arange(10)}, Y),
        ({"x": X, "flag": True, "names": ["a", "b"], "scale": 2.0}, {"y": Y, "weight": None}),
        (UserDict(x=X), (Y, [Y])),
        ((X, (X, {"a": X.bool()})), [Y]),
        (Pair(X, None), Pair(Y, 1)),
        ({"x": X, "mask": torch.ones(1, 4).expand(10, 4)}, Y),
        (X.t().contiguous().t(), Y),
    ],
)
def test_forms_of_a_batch(inputs: Any, targets: Any) -> None:
    model = make_model()
    expected = F.cross_entropy(model(X), Y).detach()
    for transport in ("loopback", "threads"):
        with pl.Pipeline(model, SCHEDULE, loss_fn=loss_fn, transport=transport) as pipe:
            torch.testing.assert_close(pipe.step(inputs, targets), expected)
            torch.testing.assert_close(pipe.evaluate(inputs, targets), expected)
            torch.testing.assert_close(pipe.forward(inputs), model(X))


def test_a_loader_with_a_smaller_last_batch() -> None:
    model = make_model()
    loader = DataLoader(TensorDataset(*make_batch(22)), batch_size=8)
    with pl.Pipeline(model, SCHEDULE, loss_fn=loss_fn) as pipe:
        for inputs, targets in loader:
            expected = F.cross_entropy(model(inputs), targets).detach()
            torch.testing.assert_close(pipe.step(inputs, targets), expected)


def test_batches_made_in_inference_mode() -> None:
    with torch.inference_mode():
        inputs, targets = X.clone(), Y.clone()
    model = make_model()
    expected = F.cross_entropy(model(X), Y).detach()
    with pl.Pipeline(model, SCHEDULE, loss_fn=loss_fn) as pipe:
        for run in (pipe.step, pipe.step, pipe.evaluate):
            torch.testing.assert_close(run(inputs, targets.clone()), expected)


def test_ranks_pass_none_for_what_they_do_not_read() -> None:
    schedule = pl.schedules.build("1f1b", num_ranks=3, num_microbatches=4)

    def work() -> float:
        with pl.Mesh(pp=3) as mesh, pl.Pipeline(make_model(), schedule, loss_fn=loss_fn, mesh=mesh) as pipe:
            return pipe.step(X if pipe.needs_inputs else None, Y if pipe.needs_targets else None).item()

    expected = F.cross_entropy(make_model()(X), Y).item()
    assert pl.run_threads(3, work) == pytest.approx([expected] * 3, rel=1e-6)


@pytest.mark.parametrize(
    ("inputs", "targets", "message"),
    [
        ((X, Y), None, r"targets=None: a batch of two tensors is passed as inputs\. Call step\(\*batch\)\."),
        ([X, Y], None, r"Call step\(\*batch\)\."),
        ({"x": X, "labels": Y}, None, r"which hold 'labels'\. Pass both, as in step\(batch, batch\['labels'\]\)\."),
        (X, None, "targets=None: the rank with the last stage reads them"),
        (X.numpy(), Y, r"inputs hold a value of type ndarray: .* Convert it with torch\.from_numpy\(x\)\."),
        (Sample(X, Y), Y, r"inputs hold a value of type Sample: .* Convert it with vars\(x\), or take its tensors\."),
        ({X}, Y, r"inputs hold a value of type set: .* Convert it with list\(x\) or dict\(x\)"),
        (X.to_sparse(), Y, "Convert it to a dense tensor"),
        (X.to("meta"), Y, "inputs hold a tensor on the meta device, which has no values"),
        (
            {"x": pack_sequence([X, X[:3]])},
            Y,
            "inputs hold a PackedSequence, .* pack them in a layer",
        ),
        (ENDLESS, Y, "inputs hold a value that contains itself"),
    ],
)
def test_other_batches_are_refused_with_the_fix(inputs: Any, targets: Any, message: str) -> None:
    with pl.Pipeline(make_model(), SCHEDULE, loss_fn=loss_fn) as pipe:
        with pytest.raises(InputError, match=message) as caught:
            pipe.step(inputs, targets)
        assert "\n" not in str(caught.value)
        pipe.step(X, Y)  # the next batch runs
