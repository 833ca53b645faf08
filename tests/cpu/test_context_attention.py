"""Attention of context-parallel ranks is that of one process; what it keeps, and how much it sends."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import pipeloom as pl
from pipeloom.errors import InputError
from pipeloom.parallel.context import KINDS, ContextParallel, kernels
from pipeloom.parallel.context.order import Order
from pipeloom.slicing import current_slice, current_tokens, position_rows, token_positions
from pipeloom.transport.thread_members import run_threads
from tests.cpu.context_cases import MASKS, B, D, Heads, Problem, S, attends, error
from tests.cpu.pairwise import of_grid

HEADS = (Heads(12, 12), Heads(12, 4), Heads(12, 1))


@pytest.mark.parametrize(("kind", "degree", "causal"), of_grid(KINDS, [1, 2, 3, 4], [True, False]), ids=str)
def test_attention_and_its_gradients_are_those_of_one_process(kind, degree, causal):
    for heads in HEADS:
        if kind == "ulysses" and heads == Heads(12, 4) and degree == 3:
            continue  # refused, see below
        for masks in MASKS:
            attends(kind, degree, Problem(heads, causal=causal, masks=masks))


@pytest.mark.parametrize("kind", KINDS)
def test_sixteen_bits_are_as_exact_as_in_one_process(kind):
    problem = Problem(Heads(4, 2), causal=True, masks="documents", dtype=torch.bfloat16)
    exact = Problem(Heads(4, 2), causal=True, masks="documents")
    exact.values, exact.d_out = [value.double() for value in problem.values], problem.d_out.double()
    expected = exact.alone()
    alone = error([value.double() for value in problem.alone()], expected)
    for found, _ in run_threads(2, partial(problem.together, kind, 2)):
        assert {value.dtype for value in found} == {torch.bfloat16}
        assert error([value.double() for value in found], expected) <= 1.5 * alone


def test_blocks_without_flash_attention_are_the_same(monkeypatch):
    monkeypatch.setattr(kernels, "_kernel", lambda q, masked: kernels.Plain())
    for masks in MASKS:
        attends("ring", 3, Problem(Heads(12, 4), causal=True, masks=masks))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("degree", [2, 4])
def test_bytes_sent_are_those_of_the_formulas(kind, degree):
    heads = Heads(8, 4)
    query, key = (size * B * S // degree * D * 8 for size in heads)  # bytes per rank: q and out, k and v
    if kind == "ulysses":
        forward = backward = (degree - 1) * (2 * query + 2 * key) // degree
    else:
        forward, backward = (degree - 1) * 2 * key, (degree - 1) * 4 * key
    problem = Problem(heads, causal=True, masks="none")
    for _, sent in run_threads(degree, partial(problem.together, kind, degree)):
        assert sent == {"forward": forward, "backward": backward}


@pytest.mark.parametrize("degree", [2, 3, 4])
def test_zig_zag_is_balanced_and_computes_no_masked_block(degree):
    def pairs(name: str, rank: int) -> int:
        order = Order(name, degree, 24 * degree)
        blocks = [block for source in range(degree) for block in order.blocks(rank, source, causal=True)]
        sizes = [(b.rows.stop - b.rows.start) * (b.columns.stop - b.columns.start) for b in blocks]
        return sum(size // 2 if block.causal else size for size, block in zip(sizes, blocks, strict=True))

    zig_zag, plain = ([pairs(name, rank) for rank in range(degree)] for name in ("zig-zag", "plain"))
    assert len(set(zig_zag)) == 1
    assert sum(zig_zag) == sum(plain) == (24 * degree) ** 2 // 2
    assert max(plain) == plain[-1] == (2 * degree - 1) * max(zig_zag) // degree


def saved_elements(degree: int) -> int:
    problem = Problem(Heads(4, 2), causal=True, masks="none")

    def count() -> int:
        context = ContextParallel(pl.Mesh(cp=degree).axis("cp"))
        q, k, v = (context.cut(value, 2).requires_grad_() for value in problem.values)
        saved: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            out = context.tokens(problem.marks).attend(q, k, v, causal=True, scale=None, window=None)
        assert {t.data_ptr() for t in saved} >= {t.data_ptr() for t in (q, k, v, out)}
        return sum(t.numel() for t in saved)

    (size,) = set(run_threads(degree, count))
    return size


def test_ring_attention_keeps_its_inputs_its_output_and_one_number_per_row():
    whole = B * S * (2 * 4 * D + 2 * 2 * D + 4)
    assert [saved_elements(degree) for degree in (1, 2, 3)] == [whole, whole // 2, whole // 3]


def test_rows_of_tables_are_found_once_for_each_version():
    table = torch.arange(2.0 * S)

    def run() -> None:
        own, context = table.clone(), ContextParallel(pl.Mesh(cp=2).axis("cp"))
        for length in (S, 2 * S, S):
            with context.tokens({"length": length}).current() as tokens:
                rows = position_rows(own, length // 2)
                assert torch.equal(rows, own[tokens.positions()])
                assert position_rows(own, length // 2) is rows
        with context.tokens({"length": S}).current() as tokens:
            assert position_rows(own, S // 2).data_ptr() == rows.data_ptr()
            own += 1
            assert torch.equal(position_rows(own, S // 2), own[tokens.positions()])
            assert position_rows(own.requires_grad_(), S // 2).requires_grad

    run_threads(2, run)


def test_cut_and_gather_are_inverse_and_positions_say_what_is_held():
    whole = torch.arange(S).expand(3, S)

    def run() -> None:
        for kind in KINDS:
            context = ContextParallel(pl.Mesh(cp=3).axis("cp"), kind)
            part = context.cut(whole)
            assert torch.equal(context.gather(part), whole)
            assert current_tokens() is None
            with context.tokens({"length": S}).current() as tokens:
                assert current_tokens() is tokens
                assert torch.equal(token_positions(S // 3), part[0])
                assert torch.equal(position_rows(whole[0] * 2, S // 3), part[0] * 2)
                with pytest.raises(InputError, match=r"^a module calls current_slice\(\) under context parallelism"):
                    current_slice()
            assert current_tokens() is None

    run_threads(3, run)
