"""Measuring slices runs what a pipeline runs: a model's own blocks on slices, with the values of the whole."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from pipeloom.cli import main
from pipeloom.errors import InputError
from pipeloom.models import GPT, GPTConfig, init_parameters
from pipeloom.plan.slicing.measure_slices import measure_slices, measure_stage_slices
from pipeloom.slicing import current_slice
from pipeloom.split import split


class Watched(nn.Module):
    """Notes the slices that it runs on, and what comes out."""

    sliceable = True

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage
        self.seen: dict[tuple[int, int, int], torch.Tensor] = {}

    def forward(self, value):
        output = self.stage(value)
        piece = current_slice()
        self.seen[piece.start, piece.end, piece.length] = output.detach()
        return output


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_what_is_measured_are_the_models_own_blocks_on_slices_of_a_sequence(positions):
    config = GPTConfig(layers=2, width=16, heads=2, sequence_length=48, positions=positions)
    model = GPT(config)
    init_parameters(model, seed=0)
    blocks = nn.Sequential(*model.blocks).double()
    x_BSW = torch.randn(2, 48, 16, dtype=torch.float64)
    whole_BSW = blocks(x_BSW)
    watched = Watched(blocks)
    measure_stage_slices(watched, lambda _, tokens: x_BSW[:, :tokens], sequence=48, num_ranks=99, piece=2, num_rounds=1)
    assert (0, 48, 48) in watched.seen
    assert (12, 21, 22) in watched.seen  # a quarter of what is behind 12 tokens, and a token that goes on
    assert (21, 22, 22) in watched.seen  # whose backward comes first
    assert (36, 48, 48) in watched.seen
    for (start, end, _), output in watched.seen.items():
        torch.testing.assert_close(output, whole_BSW[:, start:end], rtol=1e-12, atol=1e-12)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not x_BSW.requires_grad


def test_stages_of_a_hugging_face_model_are_measured_alike():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2, n_embd=8, n_head=2, n_positions=32, vocab_size=40, bos_token_id=0, eos_token_id=0
    )
    first, last = split(transformers.GPT2LMHeadModel(config), 2, parts_of_sequences=True).modules
    for stage, sample in (
        (first, lambda samples, tokens: torch.randint(40, (samples, tokens))),
        (last, lambda samples, tokens: torch.randn(samples, tokens, 8)),
    ):
        costs = measure_stage_slices(stage, sample, sequence=32, num_ranks=99, num_rounds=1).costs
        assert [tokens for tokens, _ in costs.forward.base] == [8, 16, 24, 32]
        assert min(seconds for _, seconds in (*costs.forward.base, *costs.backward.base)) > 0


def test_a_stage_that_looks_at_the_whole_sequence_is_refused():
    with pytest.raises(InputError, match="attends to the whole sequence"):
        measure_stage_slices(
            nn.TransformerEncoderLayer(8, 2), lambda b, t: torch.randn(b, t, 8), sequence=16, num_ranks=99
        )


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
    assert "measured here; error of the fit: " in capsys.readouterr().out
