"""Outputs and evaluations beside training: logits of slices on a grid, and runs in inference mode."""

import pytest
import torch

import pipeloom as pl
from pipeloom.models import GPT, GPTConfig, init_parameters, loss_fn
from pipeloom.transport.thread_members import run_threads

_CONFIG = GPTConfig(vocabulary_size=16, width=16, layers=1, heads=4, sequence_length=8)
_IDS = torch.arange(32).view(4, 8) % 16


def _model() -> GPT:
    model = GPT(_CONFIG)
    init_parameters(model, seed=0)
    return model


def test_the_logits_of_slices_on_a_grid_are_joined_along_the_tokens() -> None:
    expected = _model()(_IDS).detach()

    def output() -> torch.Tensor:
        mesh, schedule = pl.Mesh(tp=4), pl.schedules.seq1f1b(num_ranks=1, num_microbatches=1, num_slices=2)
        model = pl.parallelize(_model(), mesh, layout="2d")
        with pl.Pipeline(model, schedule, loss_fn=loss_fn, mesh=mesh) as pipeline:
            return pipeline.forward(_IDS)

    for found in run_threads(4, output, timeout_seconds=60):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_context_parallel_training_after_an_evaluation_in_inference_mode(mode: type) -> None:
    def train() -> list[float]:
        mesh, schedule = pl.Mesh(cp=2), pl.schedules.one_f_one_b(num_ranks=1, num_microbatches=1)
        with pl.Pipeline(_model(), schedule, loss_fn=loss_fn, mesh=mesh) as pipeline:
            with mode():
                evaluated = pipeline.evaluate(_IDS, _IDS).item()
            return [evaluated, pipeline.step(_IDS, _IDS).item()]

    for evaluated, trained in run_threads(2, train, timeout_seconds=60):
        assert evaluated == pytest.approx(trained, rel=1e-6)
