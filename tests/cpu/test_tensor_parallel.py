"""Megatron's tensor and sequence parallelism: losses and gradients are those of one process, with every schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pipeloom as pl
from pipeloom.engine.binders import sequence_slices
from pipeloom.models import loss_fn
from pipeloom.parallel.tensor.one_d.logits import VocabularyLogits
from pipeloom.slicing import SliceContext
from tests.cpu.pairwise import in_turn, of_grid
from tests.cpu.tensor_cases import (
    TOKENS,
    assert_equal,
    batch,
    build,
    config,
    on_mesh,
    one_process,
    run,
)

MODELS = {
    "plain": {},
    "grouped": {"kv_heads": 2, "tie_embeddings": True, "positions": "learned"},
    "padded": {"kv_heads": 1, "vocabulary_size": 31, "tie_embeddings": True},
}


@pytest.mark.parametrize(("model", "tp", "sequence"), of_grid(MODELS, (2, 4), (False, True)), ids=str)
def test_one_stage_equals_one_process(model, tp, sequence):
    sizes = config(**MODELS[model])
    assert_equal(run(lambda: build(sizes), tp=tp, sequence=sequence), one_process(build(sizes)))


SCHEDULES: dict[str, dict[str, Any]] = {"1f1b": {}, "zb-v": {}, "interleaved": {"num_chunks": 2}, "dualpipev": {}}


@pytest.mark.parametrize(
    ("schedule", "model", "sequence"), of_grid(SCHEDULES, ("plain", "grouped"), (False, True)), ids=str
)
def test_pipelines_equal_one_process(schedule, model, sequence):
    """With tied embeddings on the first and last stage, whose gradients the pipeline sums."""
    sizes = config(**MODELS[model])
    found = run(lambda: build(sizes), schedule, schedule_options=SCHEDULES[schedule], pp=2, tp=2, sequence=sequence)
    assert_equal(found, one_process(build(sizes)))


@pytest.mark.parametrize(("data", "sequence"), in_turn(["ddp", "zero1", "zero3"], [False, True]), ids=str)
def test_replicas_of_tensor_parallel_stages_update_as_one_process(data, sequence):
    """After an update, since ZeRO's gradients are shards."""
    sizes = config(**MODELS["grouped"])
    model, (inputs, targets) = build(sizes), batch()
    one_process(model)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    schedule = pl.schedules.build("1f1b", num_ranks=2, num_microbatches=2)

    def work(mesh):
        whole = pl.parallelize(build(sizes), mesh, sequence=sequence)
        own = slice(2 * mesh.coordinate("dp"), 2 * mesh.coordinate("dp") + 2)
        with pl.Pipeline(whole, schedule, loss_fn=loss_fn, mesh=mesh, data=data) as pipe:
            optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
            pipe.step(inputs[own], targets[own])
            found = pl.clip_grad_norm(pipe, 0.5)
            optimizer.step()
            return found, {name: value.clone() for name, value in pipe.state_dict().items()}

    for found, state in on_mesh(work, pp=2, dp=2, tp=2):
        torch.testing.assert_close(found.double(), norm, rtol=1e-10, atol=0)
        for name, value in state.items():
            torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("schedule", "recompute", "sequence"), of_grid(("1f1b", "zb-v"), ("full", "selective"), (False, True)), ids=str
)
def test_recomputation_repeats_the_same_collectives(schedule, recompute, sequence):
    sizes = config(**MODELS["grouped"])
    options = {"recompute": recompute}
    found = run(lambda: build(sizes), schedule, pp=2, tp=2, sequence=sequence, pipeline_options=options)
    assert_equal(found, one_process(build(sizes)))


@pytest.mark.parametrize(
    ("model", "schedule", "sequence"), of_grid(("grouped", "padded"), ("1f1b", "seq1f1b"), (False, True)), ids=str
)
def test_dropout_masks_are_those_of_one_process(model, schedule, sequence, monkeypatch):
    """In slices; also where these end inside a block of random numbers."""
    sizes = config(**MODELS[model], dropout=0.3)
    options = {
        "schedule_options": {"num_slices": 2} if schedule == "seq1f1b" else {},
        "pipeline_options": {"slices": [4, 8] if schedule == "seq1f1b" else [TOKENS]},
    }
    run(lambda: build(sizes), schedule, pp=2, tp=2, sequence=sequence, **options)  # tensor-parallel ranks share a seed
    monkeypatch.setattr(sequence_slices, "SliceContext", lambda seed: SliceContext((7, *seed[1:])))
    alone = run(lambda: build(sizes), schedule, pp=2, **options)
    assert_equal(run(lambda: build(sizes), schedule, pp=2, tp=2, sequence=sequence, **options), alone)
    without = run(lambda: build(config(**MODELS[model])), pp=2)
    assert abs(without.loss - alone.loss) > 1e-3


def test_dropout_needs_slices_between_threads():
    with pytest.raises(pl.PipeloomError, match=r"ranks that are threads.*slices="):
        run(lambda: build(config(dropout=0.1)), tp=2)


@pytest.mark.parametrize("schedule", ["1f1b", "chimera"])  # the latter has its last stage on two ranks
def test_evaluation_and_full_logits(schedule):
    sizes = config(**MODELS["padded"])
    model, (inputs, targets) = build(sizes), batch()
    expected, logits = loss_fn(model(inputs), targets), model(inputs)

    def work(mesh):
        whole = pl.parallelize(build(sizes), mesh, sequence=True)
        made = pl.schedules.build(schedule, num_ranks=2, num_microbatches=4)
        with pl.Pipeline(whole, made, loss_fn=loss_fn, mesh=mesh) as pipe:
            for part in pipe._evaluate(lambda: (inputs, None), with_loss=False).outputs.values():  # not of another rank
                assert not isinstance(part, VocabularyLogits) or part.vocabulary.axis is mesh.axis("tp")
            return pipe.evaluate(inputs, targets), pipe.forward(inputs)

    for loss, output in on_mesh(work, pp=2, tp=2):
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
        if output is not None:
            torch.testing.assert_close(output, logits.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("model", ["grouped", "padded"])
def test_plans_without_sections_cut_fused_layers_between_heads(model):
    sizes = config(**MODELS[model])
    plan = {"blocks.*.qkv": "column", "blocks.*.attention_out": "row"}
    assert_equal(run(lambda: build(sizes), plan=plan, tp=2), one_process(build(sizes)))
