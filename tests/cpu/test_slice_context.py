"""Slices of a sequence in a plain loop, without a pipeline: gradients are those of the whole sequence."""

from __future__ import annotations

import gc
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from pipeloom.autograd.split_backward import backward_input
from pipeloom.errors import InputError, RunError
from pipeloom.models import GPT, GPTConfig, init_parameters
from pipeloom.slicing import Slice, SliceContext, causal_attention, current_slice, dropout, make_sliceable
from tests.cpu.pairwise import in_turn, of_grid

LENGTH = 70  # longer than a block of random numbers
CUTS = {1: [0, 70], 2: [0, 41, 70], 3: [0, 1, 33, 70], 5: [0, 30, 32, 33, 64, 70], 7: [0, 20, 31, 41, 50, 58, 65, 70]}


class Recomputed(nn.Module):
    """A block under activation checkpointing."""

    sliceable = True

    def __init__(self, block: nn.Module, reentrant: bool = False) -> None:
        super().__init__()
        self.block, self.reentrant = block, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=self.reentrant)


def build(recompute: str | None = None, dtype: torch.dtype = torch.float64, **changes) -> GPT:
    sizes = {"vocabulary_size": 19, "layers": 3, "width": 16, "heads": 2, "sequence_length": LENGTH, **changes}
    model = GPT(GPTConfig(**sizes))
    init_parameters(model, seed=1)
    model = model.to(dtype)
    if recompute:
        model.blocks = nn.ModuleList(Recomputed(block, recompute == "reentrant") for block in model.blocks)
    return model


def tokens(batch: int) -> Tensor:
    return torch.randint(0, 19, (batch, LENGTH), generator=torch.Generator().manual_seed(batch))


def sliced_step(model: nn.Module, x: Tensor, ends: list[int], *, split: bool = False, context=None) -> list[Tensor]:
    """Forwards ascending, backwards descending over slices; the logits. Targets are the inputs themselves."""
    context = context or SliceContext(seed=(7,))
    places = [(index, start, end, ends[-1]) for index, (start, end) in enumerate(pairwise(ends))]
    losses, outputs = [], []
    for place in places:
        _, start, end, _ = place
        with context.slice(*place):
            logits = model(x[:, start:end])
            outputs.append(logits.detach())
        losses.append(F.cross_entropy(logits.flatten(0, 1), x[:, start:end].flatten(), reduction="sum") / x.numel())
    waiting = []
    for place in reversed(places):
        loss = losses.pop()
        with context.slice(*place):
            if split:
                edge = torch.autograd.graph.get_gradient_edge(loss)
                waiting.append(backward_input([edge], [torch.ones_like(loss)], [])[1])
            else:
                loss.backward()
    for weights in waiting:
        weights.accumulate()
    return outputs


def sliced_outputs(model: nn.Module, x: Tensor, ends: list[int]) -> list[Tensor]:
    """Forwards alone."""
    context = SliceContext(seed=(7,))
    outputs = []
    for index, (start, end) in enumerate(pairwise(ends)):
        with context.slice(index, start, end, ends[-1]):
            outputs.append(model(x[:, start:end]))
    return outputs


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name.replace("block.", ""): p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0, name
        error = (found[name] - gradient).norm() / gradient.norm()
        assert error < tolerance, (name, error)


@pytest.mark.parametrize(
    ("batch", "positions", "recompute", "split"),
    of_grid([1, 3], ["learned", "rotary"], [None, "recompute"], [False, True]),
    ids=str,
)
def test_gradients_of_any_slices_are_those_of_the_whole(batch, positions, recompute, split):
    x = tokens(batch)
    whole = build(positions=positions)
    logits = whole(x)
    F.cross_entropy(logits.flatten(0, 1), x.flatten()).backward()
    expected = gradients(whole)
    model = build(recompute, positions=positions)
    for ends in CUTS.values():
        context = SliceContext()
        outputs = sliced_step(model, x, ends, split=split, context=context)
        torch.testing.assert_close(torch.cat(outputs, 1), logits, rtol=1e-12, atol=1e-13)
        assert_same(gradients(model), expected)
        assert context.num_bytes == 0


@pytest.mark.parametrize("split", [False, True], ids=["B", "IW"])
@pytest.mark.parametrize("recompute", [None, "recompute", "reentrant"])
def test_dropout_masks_do_not_depend_on_the_slices(recompute, split):
    if split and recompute == "reentrant":
        pytest.skip("split backward needs checkpointing without reentry")
    x = tokens(2)
    plain = build(dropout=0.3)
    first = torch.cat(sliced_step(plain, x, CUTS[1]), 1)
    expected = gradients(plain)
    sliced_step(plain, x, CUTS[1], context=SliceContext(seed=(8,)))
    assert not torch.allclose(gradients(plain)["embedding.weight"], expected["embedding.weight"])
    model = build(recompute, dropout=0.3)
    for ends in CUTS.values():
        outputs = sliced_step(model, x, ends, split=split)
        torch.testing.assert_close(torch.cat(outputs, 1), first, rtol=1e-11, atol=1e-12)
        assert_same(gradients(model), expected)


def test_seeds_follow_from_the_default_generator():
    x, model = tokens(1), build(dropout=0.2)
    torch.manual_seed(4)
    first = sliced_step(model, x, CUTS[2], context=SliceContext())
    second = sliced_step(model, x, CUTS[2], context=SliceContext())
    torch.manual_seed(4)
    again = sliced_step(model, x, CUTS[2], context=SliceContext())
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[1], second[1])


def test_dropout_drops_its_share_and_keeps_the_mean():
    x = torch.ones(2, 400, 50)
    with SliceContext().slice(0, 0, 400, 400):
        y = dropout(x, 0.25, "it")
        assert not torch.equal(y, dropout(x, 0.25, "another"))
        assert torch.equal(dropout(x, 1.0, "all"), torch.zeros_like(x))
    assert y.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert y.mean().item() == pytest.approx(1, abs=0.02)
    assert not torch.equal(y[:, :32], y[:, 32:64])
    assert not torch.equal(y[0], y[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_smaller_types_agree_to_their_precision(dtype):
    x = tokens(2)
    whole = build(dtype=dtype)
    F.cross_entropy(whole(x).flatten(0, 1), x.flatten()).backward()
    model = build(dtype=dtype)
    sliced_step(model, x, CUTS[7])
    assert_same(gradients(model), gradients(whole), 1e-5 if dtype is torch.float32 else 0.05)


@pytest.mark.parametrize(("heads", "masked"), in_turn([(4, 4), (6, 2), (4, 1)], [False, True]), ids=str)
def test_attention_with_groups_scale_and_mask(heads, masked):
    B, S, D, (H, K) = 2, LENGTH, 8, heads
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, n, S, D, dtype=torch.float64, generator=generator).requires_grad_() for n in (H, K, K))
    seed = torch.randn(B, H, S, D, dtype=torch.float64, generator=generator)
    mask = torch.ones(S, S, dtype=torch.bool).tril().expand(B, 1, S, S).clone()
    mask[1, :, :, 3:9] &= torch.eye(S, dtype=torch.bool)[:, 3:9] if masked else True
    repeated = (k.repeat_interleave(H // K, 1), v.repeat_interleave(H // K, 1))
    whole = F.scaled_dot_product_attention(q, *repeated, mask, scale=0.3)
    expected = torch.autograd.grad(whole, (q, k, v), seed)
    for ends in CUTS.values():
        context, parts, found = SliceContext(), [], [torch.zeros_like(t) for t in (q, k, v)]
        for index, (a, b) in enumerate(pairwise(ends)):
            with context.slice(index, a, b, S):
                given = mask[:, :, a:b, :b] if masked else None
                parts.append(causal_attention(*(t[:, :, a:b] for t in (q, k, v)), "it", scale=0.3, mask=given))
        torch.testing.assert_close(torch.cat(parts, 2), whole, rtol=1e-12, atol=1e-13)
        for index, (a, b) in reversed(list(enumerate(pairwise(ends)))):
            with context.slice(index, a, b, S):
                for total, part in zip(
                    found, torch.autograd.grad(parts[index], (q, k, v), seed[:, :, a:b]), strict=True
                ):
                    total += part
        for total, gradient in zip(found, expected, strict=True):
            torch.testing.assert_close(total, gradient, rtol=1e-11, atol=1e-12)


def test_evaluation_keeps_no_gradients_and_close_lets_go():
    x, model, context, outputs = tokens(1), build(), SliceContext(), []
    with torch.no_grad():
        for index, (a, b) in enumerate(pairwise(CUTS[3])):
            with context.slice(index, a, b, LENGTH):
                outputs.append(model(x[:, a:b]))
        torch.testing.assert_close(torch.cat(outputs, 1), model(x), rtol=1e-12, atol=1e-13)
    assert context.num_bytes == 3 * 2 * LENGTH * 16 * 8  # keys and values of three blocks
    context.close()
    assert context.num_bytes == 0


def test_micro_batches_interleave():
    model, xs = build(), [tokens(1), tokens(2)]
    for x in xs:
        sliced_step(model, x, [0, 40, LENGTH])
    expected = gradients(model)
    contexts, losses = [SliceContext(), SliceContext()], {}
    for piece, (a, b) in enumerate([(0, 40), (40, LENGTH)]):
        for number, x in enumerate(xs):
            with contexts[number].slice(piece, a, b, LENGTH):
                logits = model(x[:, a:b])
            flat = F.cross_entropy(logits.flatten(0, 1), x[:, a:b].flatten(), reduction="sum")
            losses[number, piece] = flat / x.numel()
    for piece, (a, b) in reversed(list(enumerate([(0, 40), (40, LENGTH)]))):
        for number in (0, 1):
            with contexts[number].slice(piece, a, b, LENGTH):
                losses.pop((number, piece)).backward()
    assert_same(gradients(model), expected)


@pytest.mark.usefixtures("new_objects_alone")
def test_nothing_lives_on_after_the_last_backward():
    before = sum(issubclass(type(o), Tensor) for o in gc.get_objects())
    model = build("recompute", dropout=0.1)
    sliced_step(model, tokens(1), CUTS[3])
    del model
    gc.collect()
    assert sum(issubclass(type(o), Tensor) for o in gc.get_objects()) <= before
    assert current_slice() is None


def test_a_slice_is_made_of_its_context_and_range():
    piece = Slice(SliceContext(), 1, 4, 6, 8, first_time=False)
    assert (piece.index, piece.start, piece.end, piece.length, piece.cache) == (1, 4, 6, 8, {})
    with pytest.raises(AttributeError, match="begin"):
        piece.begin = 4


def test_public_names_of_contexts_and_models():
    assert SliceContext(seed=(1, 2)).random_seed() == SliceContext(seed=[1, 2]).random_seed()
    unseeded = SliceContext()
    assert unseeded.random_seed() == unseeded.random_seed()
    assert GPTConfig(vocabulary_size=19, layers=3, width=16, heads=2, sequence_length=8).head_width == 8


def test_misuse_is_named():
    x, model = tokens(1), build()
    context = SliceContext()
    losses = []
    for index, (a, b) in enumerate(pairwise(CUTS[2])):
        with context.slice(index, a, b, LENGTH):
            losses.append(model(x[:, a:b]).sum())
    with context.slice(0, 0, 41, LENGTH), pytest.raises(RunError, match=r"in descending order.*later slices first"):
        losses[0].backward()
    with pytest.raises(InputError, match=r"extends a sequence by 5 tokens in a slice of 41"):  # noqa: SIM117
        with SliceContext().slice(0, 0, 41, LENGTH):
            model(x[:, :5])
    with pytest.raises(InputError, match="longer than sequence_length=70"), SliceContext().slice(0, 0, 41, 71):
        model(x[:, :41])
    with pytest.raises(InputError, match="at least one token"), SliceContext().slice(1, 41, 41, LENGTH):
        pass


def test_a_block_that_runs_twice_is_sliced_but_not_recomputed():
    x = tokens(1)
    whole, model, recomputed = build(), build(), build("recompute")
    for net in (whole, model, recomputed):
        net.blocks[1] = net.blocks[0]
    F.cross_entropy(whole(x).flatten(0, 1), x.flatten()).backward()
    sliced_step(model, x, CUTS[3])
    assert_same(gradients(model), gradients(whole))
    with pytest.raises(RunError, match=r"Block runs 2 times per slice, .* recomputation"):
        sliced_step(recomputed, x, CUTS[3])


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True)


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (nn.Conv1d(4, 4, 3), r"'1' \(Conv1d\) is a convolution along the sequence"),
        (nn.BatchNorm1d(4), r"'1' \(BatchNorm1d\) normalises over several tokens"),
        (nn.MultiheadAttention(4, 1), r"attends to the whole sequence"),
        (nn.LSTM(4, 4), r"would restart in every slice"),
        (nn.LayerNorm((3, 4)), r"normalises over 2 dimensions"),
        (nn.Softmax(1), r"over dimension 1"),
        (Mean(), r"'1' \(Mean\) is not known to process tokens independently"),
        (nn.Sequential(nn.Linear(4, 4), Mean()), r"'1.1' \(Mean\)"),
        (torch.compile(nn.Linear(4, 4), backend="eager"), r"is compiled"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_sliced_is_refused_by_name(module, said):
    with pytest.raises(InputError, match=said) as error:
        make_sliceable(nn.Sequential(nn.Linear(4, 4), module))
    assert "\n" not in str(error.value)


class Declared(nn.Linear):
    sliceable = True


class Overriding(Declared):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x.mean(1, keepdim=True)


class Inheriting(Declared):
    pass


def with_hook(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda module, args, output: output + output.mean(1, keepdim=True))
    return module


def with_own_forward(module: nn.Module) -> nn.Module:
    module.forward = lambda x: x - x.mean(1, keepdim=True)
    return module


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (Overriding(4, 4), "overrides the forward of the class that declares"),
        (with_hook(nn.Linear(4, 4)), "has forward hooks"),
        (with_hook(nn.Sequential()), "has forward hooks"),
        (with_own_forward(nn.Linear(4, 4)), "has a forward set on the instance"),
    ],
)
def test_a_declaration_is_about_the_forward_that_runs(module, said):
    with pytest.raises(InputError, match=said):
        make_sliceable(nn.Sequential(module))
    module.sliceable = True
    make_sliceable(nn.Sequential(module, Inheriting(4, 4), with_own_forward(Declared(4, 4)), with_hook(Declared(4, 4))))


def test_hooks_that_compute_weights_pass():
    make_sliceable(nn.utils.spectral_norm(nn.Linear(4, 4)))


def test_declared_modules_pass_and_dropouts_are_replaced():
    shared, own = nn.Dropout(0.5), Mean()
    own.sliceable = True
    model = nn.Sequential(nn.Embedding(19, 4), shared, nn.Sequential(nn.Linear(4, 4), shared), own)
    make_sliceable(model)
    make_sliceable(model)
    assert model[1] is model[2][1]
    x = tokens(1)
    torch.manual_seed(0)
    whole = model(x)
    torch.manual_seed(0)
    assert torch.equal(whole, nn.Sequential(model[0], shared, nn.Sequential(model[2][0], shared), own)(x))
    chain = model[:3]  # Mean declared what is not so
    one, many = (torch.cat(sliced_outputs(chain, x, ends), 1) for ends in (CUTS[1], CUTS[5]))
    assert torch.equal(one == 0, many == 0)
    assert 0 < (one == 0).double().mean() < 1
    wrapped = build()
    for name, block in wrapped.blocks.named_children():
        wrapped.blocks._modules[name] = checkpoint_wrapper(block)
    make_sliceable(wrapped)
