"""Measuring slices runs what it says: a GPT's blocks behind a context, with the values and gradients of the whole."""

from __future__ import annotations

import json

import pytest
import torch

from pipeloom.cli import main
from pipeloom.models import GPTConfig
from pipeloom.plan.slicing.measure import Share, measure_slices


@pytest.mark.parametrize("positions", ["learned"])  # a measured slice turns by positions from 0, whatever is before it
def test_a_slice_behind_its_context_is_the_end_of_the_sequence(positions):
    config = GPTConfig(layers=1, width=16, heads=2, sequence_length=12, positions=positions)
    share = Share(config).double()
    x_BSW = torch.randn(1, 12, 16, dtype=torch.float64)
    whole_BSW = share((x_BSW, []))
    [block] = share.blocks
    _, k, v = block.qkv(block.attention_norm(x_BSW[:, :7])).view(1, 7, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
    part_BSW = share((x_BSW[:, 7:], [(k, v)]))
    torch.testing.assert_close(part_BSW, whole_BSW[:, 7:], rtol=1e-12, atol=1e-12)


def test_measured_costs_cover_the_sequence():
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    config = GPTConfig(layers=3, width=16, heads=2, sequence_length=40)
    measured = measure_slices(config, num_ranks=2, grid=8, piece=2, batch=3)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)
    for time in (measured.costs.forward, measured.costs.backward):
        tokens = [n for n, _ in time.base]
        assert tokens == sorted(set(tokens))
        assert (tokens[0], tokens[-1]) == (8, 3 * 40)
        assert min(seconds for _, seconds in time.base) > 0
        assert min(time.context) >= 0


def test_the_command_measures_and_writes_what_it_measured(capsys, tmp_path):
    path = tmp_path / "costs.json"
    sizes = ["--sequence", "33", "--ranks", "2", "--batch", "2", "--grid", "8"]
    model = ["--model.layers", "2", "--model.width", "16", "--model.heads", "2", "--model.dropout", "0.1"]
    assert main(["slice", *sizes, *model, "--write-costs", str(path), "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert main(["slice", *sizes, "--costs", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == first
    assert main(["slice", *sizes, *model]) == 0
    assert "the fit is off by" in capsys.readouterr().out
