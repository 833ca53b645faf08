"""Cutting models into stages: every parameter in a stage, under its own name, ties seen, cuts optimal."""

from __future__ import annotations

import copy
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from pipeloom.errors import SplitError
from pipeloom.split import StageModule, partition, profile_layers, split


class Blocks(nn.Module):
    """embedding, blocks, norm, head with the head tied to the embedding."""

    pipeline_layers = ("embedding", "blocks.*", "norm", "head")

    def __init__(self, num_blocks: int = 5, width: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(num_blocks))
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def run(modules, value):
    for module in modules:
        value = module(value)
    return value


# ---------------------------------------------------------------------------------------------------- partition


def all_cuts(num_layers: int, num_stages: int):
    for ends in combinations(range(1, num_layers), num_stages - 1):
        yield [b - a for a, b in zip([0, *ends], [*ends, num_layers], strict=True)]


def stage_weights(weights, counts):
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    return [sum(weights[end - count : end]) for end, count in zip(ends, counts, strict=True)]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=9), st.data())
def test_partition_is_the_best_of_all_cuts(weights, data):
    num_stages = data.draw(st.integers(1, len(weights)))
    cuts = [(stage_weights(weights, counts), counts) for counts in all_cuts(len(weights), num_stages)]
    if sum(w > 0 for w in weights) >= num_stages:
        cuts = [(loads, counts) for loads, counts in cuts if min(loads) > 0]
    # the heaviest stage, then the heaviest of all but the first, and so on
    best = min([max(loads[i:]) for i in range(num_stages)] for loads, _ in cuts)
    counts = partition(weights, num_stages)
    assert sum(counts) == len(weights)
    assert min(counts) >= 1
    loads = stage_weights(weights, counts)
    assert [max(loads[i:]) for i in range(num_stages)] == best
    assert counts in [counts for _, counts in cuts]


def test_partition_evens_out_the_later_stages():
    assert partition([1] * 7, 3) == [3, 2, 2]
    assert partition([0.1] * 10, 4) == [3, 3, 2, 2]  # equal floats are equal loads: 0.1 + 0.1 + 0.1 > 0.3 as floats
    assert partition([1, 1, 1, 9], 2) == [3, 1]
    assert partition([0, 1, 1, 1, 1, 0, 0], 4) == [2, 1, 1, 3]


@pytest.mark.parametrize(
    ("weights", "num_stages", "said"),
    [([1, 1], 3, "num_stages=2 or fewer"), ([1], 0, "num_stages=0"), ([1, -1], 1, "-1"), ([1, float("nan")], 1, "nan")],
)
def test_partition_refuses(weights, num_stages, said):
    with pytest.raises(SplitError, match=said):
        partition(weights, num_stages)


# ------------------------------------------------------------------------------------------------------- stages


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
def test_stages_hold_the_models_own_parameters_under_their_names(num_stages):
    model = Blocks()
    stages = split(model, num_stages)
    union = {}
    for module in stages.modules:
        for name, value in module.state_dict(keep_vars=True).items():
            assert union.setdefault(name, value) is value
    whole = model.state_dict(keep_vars=True)
    assert union.keys() == whole.keys()
    assert all(union[name] is whole[name] for name in whole)
    assert stages.parameter_names == tuple(name for name, _ in model.named_parameters())
    assert [name for names in stages.layers for name in names] == [
        "embedding", *(f"blocks.{i}" for i in range(5)), "norm", "head"
    ]  # fmt: skip
    model.eval()
    tokens = torch.randint(0, 7, (3,))
    assert torch.equal(run(stages.modules, tokens), model(tokens))


def test_single_names_ride_with_the_first_and_last_block():
    stages = split(Blocks(num_blocks=3), 3)
    assert stages.layers == (("embedding", "blocks.0"), ("blocks.1",), ("blocks.2", "norm", "head"))


def test_tied_parameters_are_reported_where_they_cross_stages():
    model = Blocks()
    (tied,) = split(model, 3).tied
    assert (tied.name, tied.names, tied.stages) == (
        "embedding.weight",
        ("embedding.weight", "head.weight"),
        (0, 2),
    )
    assert split(model, 1).tied == ()
    stages = split(model, 2)
    assert stages.canonical_names == {"head.weight": "embedding.weight"}
    assert stages.modules[0].embedding.weight is stages.modules[1].head.weight


def test_a_module_may_run_in_several_places():
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.Tanh(), shared, nn.Linear(4, 4))
    stages = split(model, 2)
    assert stages.layers == (("0", "1"), ("2", "3"))
    assert {(t.name, t.names, t.stages) for t in stages.tied} == {
        ("0.weight", ("0.weight", "2.weight"), (0, 1)),
        ("0.bias", ("0.bias", "2.bias"), (0, 1)),
    }
    x = torch.randn(2, 4)
    assert torch.equal(run(stages.modules, x), model(x))


def test_values_are_passed_on_as_one_argument():
    class Pair(nn.Module):
        def forward(self, value):
            return {"sum": value[0] + value[1]} if isinstance(value, tuple) else (value["sum"], value["sum"])

    x = torch.ones(2)
    out = run(split(nn.Sequential(Pair(), Pair(), Pair()), 2).modules, (x, x))
    assert torch.equal(out["sum"], 4 * x)


def test_nested_names_and_stars():
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = Blocks(4)
            self.towers = nn.ModuleDict({"a": nn.Sequential(nn.Tanh(), nn.Tanh()), "b": nn.Sequential(nn.Linear(7, 7))})

    layers = ["model.embedding", "model.blocks.*", "model.norm", "model.head", "towers.*.*"]
    stages = split(Wrapper(), 7, layers=layers)
    assert [name for names in stages.layers for name in names][-3:] == ["towers.a.0", "towers.a.1", "towers.b.0"]
    assert list(stages.modules[-1].state_dict()) == ["towers.b.0.weight", "towers.b.0.bias"]


def test_meta_models_are_cut_without_values():
    with torch.device("meta"):
        model = Blocks()
    assert all(p.is_meta for m in split(model, 3, cut="parameters").modules for p in m.parameters())


def test_compiled_and_checkpointed_blocks_keep_the_models_names():
    model = Blocks(4)
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
    model.blocks[2] = checkpoint_wrapper(model.blocks[2])
    model.eval()
    stages = split(model, 2)
    names = [name for m in stages.modules for name, _ in m.named_parameters() if name != "head.weight"]
    assert names == [name for name, _ in model.named_parameters()]
    keys = {key for m in stages.modules for key in m.state_dict()}
    assert keys == set(model.state_dict())
    tokens = torch.randint(0, 7, (3,))
    assert torch.equal(run(stages.modules, tokens), model(tokens))


def test_a_layer_replaced_after_the_cut_is_the_one_that_runs():
    stages = split(Blocks(4), 2)
    stages.modules[0].blocks.add_module("0", nn.Identity())
    x = torch.randint(0, 7, (3,))
    expected = stages.modules[0].blocks.get_submodule("1")(stages.modules[0].embedding(x))
    assert torch.equal(stages.modules[0](x), expected)


def test_a_copied_stage_runs_its_own_layers():
    stage = split(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 1).modules[0]
    twin = copy.deepcopy(stage)
    for parameter in stage.parameters():
        parameter.data.zero_()
    x = torch.ones(1, 2)
    assert torch.equal(stage(x), torch.zeros(1, 2))
    assert not torch.equal(twin(x), torch.zeros(1, 2))


def test_layers_keep_the_mode_that_each_has():
    model = Blocks().eval()
    model.blocks[0].train()
    stages = split(model, 2)
    assert model.blocks[0].training
    assert not model.norm.training
    assert not stages.modules[0].training


def test_one_stage_needs_no_names():
    model = nn.Bilinear(2, 2, 2)
    stages = split(model, 1)
    assert stages.modules == [model]
    assert stages.parameter_names == ("weight", "bias")


def test_a_model_that_is_cut_already():
    first, second = nn.Linear(2, 3), nn.Linear(3, 2)
    stages = split([first, second], 2)
    assert stages.parameter_names == ("0.weight", "0.bias", "1.weight", "1.bias")
    assert [list(m.state_dict()) for m in stages.modules] == [["0.weight", "0.bias"], ["1.weight", "1.bias"]]
    again = split(split(Blocks(), 3).modules, 3)  # names of the model, kept: they do not clash
    assert all(isinstance(m, StageModule) for m in again.modules)
    assert again.parameter_names == split(Blocks(), 3).parameter_names
    assert again.tied == split(Blocks(), 3).tied
    with pytest.raises(
        SplitError,
        match=r"a list of 2 modules for 3 stages: .*build the schedule for 2 stages",
    ):
        split([first, second], 3)


# --------------------------------------------------------------------------------------------------------- cuts


@pytest.mark.parametrize(
    ("cut", "sizes"),
    [([2, 3], (3, 5)), ([0, 5], (1, 7)), ([5, 0], (6, 2)), ([4, 4], (4, 4))],
)
def test_explicit_counts_in_blocks_or_layers(cut, sizes):
    assert tuple(map(len, split(Blocks(5), 2, cut=cut).layers)) == sizes


@pytest.mark.parametrize("cut", [[2, 2], [1, 1, 3], [6, -1], [], [0, 0, 5]])
def test_counts_that_do_not_add_up_are_answered_with_some_that_do(cut):
    with pytest.raises(SplitError, match=r"cut=\[3, 2\]\.$"):
        split(Blocks(5), 2, cut=cut)


def test_cut_by_parameters():
    wide = nn.Sequential(nn.Linear(2, 50), nn.Tanh(), nn.Linear(50, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    assert split(wide, 2, cut="parameters").layers == (("0",), ("1", "2", "3", "4"))


class Work(nn.Module):
    """Takes so many seconds of a clock of its own, forward and backward."""

    now = 0.0

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))
        self.seconds = forward, backward

    def forward(self, x):
        forward, backward = self.seconds
        self.take(forward)
        output = x @ self.weight
        output.register_hook(lambda gradient: self.take(backward))
        return output

    @staticmethod
    def take(seconds: float) -> None:
        Work.now += seconds


@pytest.mark.parametrize("slow", [(200.0, 1.0), (1.0, 200.0)])
def test_cut_by_time_puts_the_slow_layer_alone(monkeypatch, slow):
    monkeypatch.setitem(profile_layers.__kwdefaults__, "timer", lambda: Work.now)
    model = nn.Sequential(Work(1, 2), Work(1, 2), Work(1, 2), Work(*slow), Work(1, 2))
    stages = split(model, 2, cut="time", sample=torch.randn(4, 4))
    assert next(names for names in stages.layers if "3" in names) == ("3", "4")


def test_profiling_leaves_everything_as_found():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3))
    model[2].eval()
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
    nn.functional.cross_entropy(model(x), y).backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    buffers = dict(model.named_buffers())
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    modes = [m.training for m in model.modules()]
    random = torch.get_rng_state()
    times = profile_layers(list(model.named_children()), (x, y), loss_fn=nn.functional.cross_entropy)
    assert [t.name for t in times] == ["0", "1", "2", "3"]
    assert all(t.forward_seconds > 0 and t.backward_seconds > 0 for t in times)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers())
    assert all(torch.equal(p.grad, gradients[name]) for name, p in model.named_parameters())
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)
    assert not x.requires_grad


# -------------------------------------------------------------------------------------------------- what is refused


class Stray(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.adapter = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.drop = nn.Dropout(0.1)


def test_no_parameter_or_buffer_is_dropped():
    with pytest.raises(SplitError, match=r"'blocks.0.weight'.*Add \['blocks.0', 'blocks.1'\] to layers"):
        split(Blocks(2), 2, layers=["embedding", "norm", "head"])
    with pytest.raises(SplitError, match="adapter"):
        split(Stray(), 2)
    model = Blocks(2)
    model.register_buffer("temperature", torch.ones(1))
    with pytest.raises(SplitError, match=r"'temperature'.*submodule"):
        split(model, 2)
    model.register_buffer("temperature", torch.ones(1), persistent=False)
    split(model, 2)


def test_other_modules_left_out_are_warned_of():
    model = Blocks(2)
    model.drop = nn.Dropout(0.1)
    with pytest.warns(UserWarning, match="'drop' .Dropout. is in no layer"):
        split(model, 2)


@pytest.mark.parametrize(
    ("model", "arguments", "said"),
    [
        (Blocks(5), {"num_stages": 9}, "num_stages=9: the model has 8 layers .5 of them blocks.*num_stages=8"),
        (nn.Sequential(nn.Tanh()), {"num_stages": 2}, "num_stages=1 or fewer"),
        (Blocks(5), {"num_stages": 0}, "num_stages=0"),
        (Blocks(5), {"num_stages": 2, "layers": ["embeding", "blocks.*"]}, "Did you mean 'embedding'"),
        (Blocks(5), {"num_stages": 2, "layers": ["embedding", "blocks.*", "norm", "haed"]}, "Did you mean 'head'"),
        (Blocks(5), {"num_stages": 2, "layers": ["embedding", "block.*", "norm", "head"]}, r"Did you mean 'blocks.\*'"),
        (Blocks(5), {"num_stages": 2, "layers": ["embedding", "blocks", "norm", "head"]}, r"members: 'blocks\.\*'"),
        (Blocks(5), {"num_stages": 2, "layers": []}, r"layers=\[\]: a model needs at least one layer"),
        (Blocks(5), {"num_stages": 2, "cut": "wieght"}, "'layers', 'parameters', 'time'"),
        (Blocks(5), {"num_stages": 2, "cut": "time"}, "Pass sample="),
        (Blocks(5), {"num_stages": 2, "cut": [8, 0]}, r"cut=\[8, 0\]: leaves stage 1 without a layer"),
        (
            nn.Sequential(*(nn.Tanh() for _ in range(9))),
            {"num_stages": 2, "cut": [4, 3]},
            r"cut=\[4, 3\]: is for 2 stages and 7 layers or blocks\. There are 2 stages, and the model has 9 layers, "
            r"each of which counts\. Use a cut or plan made for this model, such as cut=\[5, 4\]",
        ),
        (nn.TransformerEncoderLayer(4, 1, 4), {"num_stages": 2}, r"layers=\['self_attn', 'linear1', "),
        (nn.Linear(2, 2), {"num_stages": 2}, "Linear has no submodules: .*num_stages=1"),
        (nn.Sequential(nn.Sequential(nn.Tanh())), {"num_stages": 1, "layers": ["0", "0.0"]}, "is inside layer '0'"),
    ],
)  # fmt: skip
def test_refusals_say_the_fix_in_one_line(model, arguments, said):
    with pytest.raises(SplitError, match=said) as error:
        split(model, **arguments)
    assert "\n" not in str(error.value)


def test_a_model_compiled_as_a_whole_is_refused():
    with pytest.raises(SplitError, match="Compile its blocks"):
        split(torch.compile(Blocks(2), backend="eager"), 2)


def test_meta_models_take_no_time():
    with torch.device("meta"):
        model = Blocks()
    with pytest.raises(SplitError, match="meta device"):
        split(model, 2, cut="time", sample=torch.zeros(3, dtype=torch.long))
