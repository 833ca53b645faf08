"""Forwards that go another way with other values, and layers that leave something behind: right, or refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pipeloom as pl
from pipeloom.split.planned.tracking.origins import Origins
from tests.cpu.test_planned_values import LAYERS, Net, compared, float64, pipeline  # noqa: F401  # a fixture


class Branches(Net):
    """What the last layer reads depends on a flag in the inputs, read in front of the layers or behind them."""

    late = False

    def forward(self, x, flag):
        early = None if self.late else bool(flag.any())
        first = self.first(x)
        y = self.through(first)
        chosen = bool(flag.any()) if self.late else early
        return self.last(y + first if chosen else y)


class LateBranches(Branches):
    late = True


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
@pytest.mark.parametrize("make", [Branches, LateBranches])
def test_branches_on_inputs_are_those_of_each_micro_batch(make, schedule, monkeypatch):
    explored = []
    begin = Origins.__init__
    monkeypatch.setattr(Origins, "__init__", lambda self: (explored.append(1), begin(self))[1])
    model, x, flag = make(), torch.randn(8, 4), torch.tensor([0, 0, 0, 1, 0, 0, 1, 1])
    with pipeline(model, ranks=2, schedule=schedule) as pipe:
        for _ in range(3):
            assert compared(model, {"x": x, "flag": flag}, x, pipe) < 1e-9
            times = len(explored)
        if not make.late:  # both ways are known after the first step
            compared(model, {"x": x, "flag": flag}, x, pipe)
            assert len(explored) == times


FLAGS = {
    "where": lambda flag: len(torch.where(flag > 0)[0]) > 0,
    "nonzero": lambda flag: flag.nonzero().shape[0] > 0,
    "mask": lambda flag: flag[flag > 0].numel() > 0,
    "slice": lambda flag: flag[: flag.sum()].numel() > 0,
    "slice of several": lambda flag: flag[None][:, : flag.sum()].numel() > 0,
    "arange": lambda flag: torch.arange(flag.sum()).numel() > 0,
    "one_hot": lambda flag: F.one_hot(flag).shape[1] > 1,
    "bincount": lambda flag: len(torch.bincount(flag)) > 1,
    "unique": lambda flag: len(flag.unique()) > 1,
    "numpy": lambda flag: np.asarray(flag).any(),
}


@pytest.mark.parametrize("name", FLAGS)
def test_branches_on_shapes_that_follow_from_values_of_inputs(name):
    class Shapes(Net):
        def forward(self, x, flag):
            first = self.first(x)
            return self.last(self.through(first) + (first if FLAGS[name](flag) else 0))

    model, x, flag = Shapes(), torch.randn(8, 4), torch.tensor([0, 0, 0, 0, 0, 1, 0, 1])
    with pipeline(model, ranks=2) as pipe:
        for _ in range(2):
            assert compared(model, {"x": x, "flag": flag}, x, pipe) < 1e-9


def test_a_padding_mask_of_some_micro_batches_is_explored_once():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config).train()
    ids = torch.randint(16, (4, 6))
    mask = torch.ones_like(ids)
    mask[2:, 4:] = 0
    batch = {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}
    built = pl.schedules.one_f_one_b(num_ranks=2, num_microbatches=4)
    with pl.Pipeline(model, built) as pipe:
        first = pipe.step(batch)
        model.zero_grad()
        torch.testing.assert_close(pipe.step(batch), first)
        assert all(len(ways) == 2 for stage in pipe.modules() for ways in stage._known._ways.values())
    expected = model(**batch).loss
    torch.testing.assert_close(first, expected.detach(), rtol=1e-6, atol=0, check_dtype=False)


class Appending(nn.Linear):
    def forward(self, x, found):
        found.append(torch.tanh(super().forward(x)))
        return found[-1]


class Lists(Net):
    """Layers leave values in a list; the last layer reads their sum."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Appending(4, 4) for _ in range(3))

    def forward(self, x):
        found = []
        y = self.first(x)
        for block in self.blocks:
            y = block(y, found)
        return self.last(sum(found))


@pytest.mark.parametrize(("ranks", "schedule"), [(2, "1f1b"), (2, "zb-v"), (5, "1f1b")])
def test_later_layers_may_add_to_a_list_too(ranks, schedule):
    model, x = Lists(), torch.randn(8, 4)
    with pipeline(model, ranks=ranks, schedule=schedule) as pipe:
        for _ in range(2):
            assert compared(model, {"x": x}, x, pipe) < 1e-9


class Adding(nn.Linear):
    def forward(self, x, total):
        y = torch.tanh(super().forward(x))
        total.add_(y)
        return y


class Totals(Net):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Adding(4, 4) for _ in range(3))

    def forward(self, x):
        y, total = self.first(x), torch.zeros_like(x)
        for block in self.blocks:
            y = block(y, total)
        return self.last(total)


class InPlace(nn.Linear):
    def forward(self, x):
        x.add_(torch.tanh(super().forward(x.clone())))


class ReturnsNone(Net):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(InPlace(4, 4) for _ in range(3))

    def forward(self, x):
        y = self.first(x)
        for block in self.blocks:
            block(y)
        return self.last(y)


class Remembering(nn.Linear):
    def __init__(self, memory):
        super().__init__(4, 4)
        self.memory = memory

    def forward(self, x):
        y = torch.tanh(super().forward(x)) + self.memory.get("last", 0)
        self.memory["last"] = y
        return y


class OneMemory(Net):
    def __init__(self):
        super().__init__()
        self.memory = {}
        self.blocks = nn.ModuleList(Remembering(self.memory) for _ in range(3))

    def forward(self, x):
        self.memory.clear()
        return self.last(self.through(self.first(x)))


class AllModules(Net):
    def forward(self, x):
        penalty = sum(m.weight.square().sum() for m in self.modules() if isinstance(m, nn.Linear))
        return self.last(self.through(self.first(x))) + penalty


class AllState(Net):
    def forward(self, x):
        penalty = sum(value.square().sum() for value in self.state_dict(keep_vars=True).values())
        return self.last(self.through(self.first(x))) + penalty


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Totals, r"'blocks.0' changes its argument '1' in place"),
        (ReturnsNone, r"'blocks.0' changes its argument '0' in place"),
        (OneMemory, r"'blocks.0' leaves a tensor in a dict or list that modules of other stages have"),
        (AllModules, r"reads all its modules, as modules\(\) gives them"),
        (AllState, r"reads all its parameters, as state_dict\(\) gives them"),
    ],
)
def test_what_stages_do_not_exchange_is_refused(make, message):
    x = torch.randn(8, 4)
    with pipeline(make(), ranks=3) as pipe, pytest.raises(pl.PipeloomError, match=message) as raised:
        pipe.step(x, x)
    assert "\n" not in str(raised.value)


def test_one_stage_runs_all_of_these_as_they_are():
    x = torch.randn(8, 4)
    built = pl.schedules.one_f_one_b(num_ranks=1, num_microbatches=1)
    for make in (Totals, ReturnsNone, OneMemory, AllModules, AllState):
        model = make()
        with pl.Pipeline(model, built, layers=LAYERS, loss_fn=F.mse_loss) as pipe:
            torch.testing.assert_close(pipe.step(x, x), F.mse_loss(model(x), x).detach())
