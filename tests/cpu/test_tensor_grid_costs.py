"""What grids of tensor-parallel processes save, what they refuse, and whether a lost sum is noticed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import pipeloom as pl
from pipeloom.errors import InputError
from pipeloom.models import loss_fn
from pipeloom.parallel.axis_forms import ChannelAxis
from pipeloom.parallel.tensor.grids.layers import GridLinear
from pipeloom.parallel.tensor.grids.shape import GridShape
from tests.cpu.grids import SHAPES, batch, compare, make_model, on_grid, size
from tests.cpu.pairwise import in_turn


def saved_bytes(model, run) -> int:
    """Bytes of the storages that the graph of `run()` keeps, without parameters and buffers."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    found: dict[int, int] = {}
    kept = []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        kept.append(tensor)  # so that no storage is freed and counted as another
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(found.values())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_process_saves_its_part_of_the_activations_alone(shape: GridShape) -> None:
    model = make_model(width=144, heads=12)
    inputs, targets = batch(shape.batch_blocks)

    def work():
        own = copy.deepcopy(model)
        on_grid(own, pl.Mesh(tp=size(shape)), shape)
        return saved_bytes(own, lambda: loss_fn(own(inputs), targets))

    full = saved_bytes(model, lambda: loss_fn(model(inputs), targets))
    for found in pl.run_threads(size(shape), work):
        assert found * size(shape) == pytest.approx(full, rel=0.02)


FORWARD = GridLinear.forward


def doubled(layer: GridLinear, x):
    y = FORWARD(layer, x)
    return y if layer.bias is None or layer.vocabulary is not None else y + layer.bias


SABOTAGE = {
    "a sum on one process": (ChannelAxis, "_reduce", lambda axis, x, target: x if axis.index == target else None),
    "a sum that is scattered": (ChannelAxis, "_reduce_scatter", lambda axis, pieces: pieces[axis.index]),
    "a sum on all processes": (ChannelAxis, "_all_reduce", lambda axis, x, combine: x),
    "pieces of others": (ChannelAxis, "_all_to_all", lambda axis, pieces, arriving: pieces),
    "a doubled bias": (GridLinear, "forward", doubled),
}
UNUSED = {("2d", "a sum that is scattered"), ("2.5d", "a sum that is scattered"), ("3d", "a sum on one process")}


def trained(model, shape: GridShape) -> list:
    """Places, models with gradients and losses of all processes, on one batch; and of the model, in one process."""
    inputs, targets = batch(shape.batch_blocks)

    def work():
        own = copy.deepcopy(model)
        mesh = pl.Mesh(tp=size(shape))
        loss_fn(on_grid(own, mesh, shape)(inputs), targets).backward()
        return mesh.place, own

    found = pl.run_threads(size(shape), work)
    loss_fn(model(inputs), targets).backward()
    return found


@pytest.mark.parametrize(("what", "shape"), in_turn(SABOTAGE, [SHAPES[0], *SHAPES[2:4]]), ids=str)
def test_a_lost_sum_is_noticed(monkeypatch: pytest.MonkeyPatch, what: str, shape: GridShape) -> None:
    model = make_model(bias=True)
    owner, method, replacement = SABOTAGE[what]
    monkeypatch.setattr(owner, method, replacement)
    if (shape.layout, what) in UNUSED:
        compare(trained(model, shape), model)
        return
    with pytest.raises((AssertionError, RuntimeError)):  # RuntimeError: shapes that do not fit
        compare(trained(model, shape), model)


@pytest.mark.parametrize("shape", [SHAPES[0], *SHAPES[2:4]], ids=str)
def test_sums_over_processes_that_hold_the_same_are_noticed_where_they_are_skipped(shape: GridShape) -> None:
    model = make_model()
    found = trained(model, shape)
    with pytest.raises(AssertionError, match=r"embedding\.weight" if shape.layout == "2.5d" else "norm"):
        compare(found, model, sums=False)
    compare(found, model)


@pytest.mark.parametrize(
    ("shape", "options", "words"),
    [
        (
            SHAPES[0],
            {"heads": 1},
            "heads=1 of blocks.0.qkv with layout 2d (2 x 2): must be a multiple of 2. Use 2.",
        ),
        (SHAPES[0], {"kv_heads": 1}, "heads=1 of blocks.0.qkv with layout 2d"),
        (
            SHAPES[0],
            {"width": 15, "heads": 5, "positions": "learned"},
            "width=15 of embedding with layout 2d (2 x 2): must be a multiple of 2. Use 14 or",
        ),
        (
            SHAPES[3],
            {"width": 18, "heads": 6, "positions": "learned"},
            "width=18 of embedding with layout 3d (2 x 2 x 2): must be a multiple of 4. Use 16 or 20.",
        ),
    ],
)
def test_models_that_no_grid_divides_are_refused(shape: GridShape, options, words) -> None:
    model = make_model(**options)
    before = dict(model.named_parameters())

    def work():
        own = copy.deepcopy(model)
        with pytest.raises(InputError) as refused:
            on_grid(own, pl.Mesh(tp=size(shape)), shape)
        assert str(refused.value).startswith(words), str(refused.value)
        assert all(p.shape == before[name].shape for name, p in own.named_parameters())

    pl.run_threads(size(shape), work)


def test_layers_that_have_no_form_on_a_grid_are_refused() -> None:
    model = make_model()
    model.blocks[0].extra = nn.Conv1d(2, 2, 1)

    def work():
        with pytest.raises(
            InputError, match=r"layer blocks\.0\.extra of type Conv1d has no kind in the plan: with layout 2d"
        ):
            on_grid(copy.deepcopy(model), pl.Mesh(tp=4), SHAPES[0])

    pl.run_threads(4, work)


def test_a_micro_batch_that_no_grid_divides_is_refused() -> None:
    model = make_model()

    def work():
        own = copy.deepcopy(model)
        on_grid(own, pl.Mesh(tp=4), SHAPES[0])
        with pytest.raises(
            InputError, match=r"micro-batch size=3 with layout 2d \(2 x 2\): must be a multiple of 2\. Use 2"
        ):
            own(batch(3)[0])

    pl.run_threads(4, work)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layout": "2d", "sequence": True}, "sequence=True with layout 2d: processes share samples and width"),
        ({"layout": "3d"}, "tp=4 with layout 3d: must be a cube l * l * l. Use 1 or 8."),
        ({"layout": "2.5d", "depth": 4}, "depth=4 with layout 2.5d and tp=4: the grid is 1 x 1, and depth must"),
        ({"depth": 2}, "depth=2 has no effect with layout 1d. Remove it, or use layout='2.5d'."),
        ({"layout": "2D"}, "layout='2D': must be one of 1d, 2d, 2.5d, 3d."),
    ],
)
def test_layouts_that_do_not_fit_are_refused(options, words) -> None:
    model = make_model()

    def work():
        with pytest.raises(InputError) as refused:
            pl.parallelize(copy.deepcopy(model), pl.Mesh(tp=4), **options)
        assert str(refused.value).startswith(words), str(refused.value)

    pl.run_threads(4, work)


def test_the_loss_wants_the_targets_of_the_whole_micro_batch() -> None:
    model = make_model()

    def work():
        own = on_grid(copy.deepcopy(model), pl.Mesh(tp=4), SHAPES[0])
        inputs, targets = batch(2)
        with pytest.raises(InputError, match="6 targets for logits of 6 tokens on each of 2 processes that share the"):
            loss_fn(own(inputs), targets[:1])

    pl.run_threads(4, work)
