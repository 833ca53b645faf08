"""Logits of which each rank has a part of the vocabulary: cross-entropy, memory, and uses that are refused."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import pipeloom as pl
from pipeloom.errors import InputError
from pipeloom.models import loss_fn
from pipeloom.models.huggingface import causal_lm_loss, causal_lm_targets
from pipeloom.parallel.tensor.cross_entropy import token_losses
from pipeloom.parallel.tensor.one_d.vocabulary import Vocabulary
from tests.cpu.pairwise import in_turn
from tests.cpu.tensor_cases import batch, build, config, on_mesh


@pytest.mark.parametrize(("vocabulary", "reduction"), in_turn([8, 7, 5, 3], ["mean", "sum", "none"]))
def test_cross_entropy(vocabulary, reduction):
    """Four ranks, of which some have padding, or nothing else."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, vocabulary, generator=generator, dtype=torch.float64) * 30
    targets = torch.randint(0, vocabulary, (6,), generator=generator)
    targets[2] = -100
    whole = logits.clone().requires_grad_()
    expected = F.cross_entropy(whole, targets, reduction=reduction)
    weights = torch.arange(1.0, 7.0, dtype=torch.float64) if reduction == "none" else torch.tensor(2.0)
    expected.backward(weights)
    block = -(-vocabulary // 4)

    def work(mesh):
        part = Vocabulary(vocabulary, mesh.axis("tp"))
        own = torch.full((6, block), 1e6, dtype=torch.float64)  # padding is never read
        own[:, : part.valid] = logits[:, part.start : part.start + part.valid]
        own.requires_grad_()
        loss = F.cross_entropy(pl.parallel.VocabularyLogits.of(own, part), targets, reduction=reduction)
        loss.backward(weights)
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-14)
        assert not own.grad[:, part.valid :].any()
        return own.grad[:, : part.valid]

    found = torch.cat(on_mesh(work, tp=4), 1)
    torch.testing.assert_close(found, whole.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy_of_short_numbers_is_computed_in_float32(dtype):
    logits = torch.randn(5, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    targets = torch.tensor([0, 5, 2, 3, 1])
    expected = F.cross_entropy(logits.float(), targets, reduction="none")

    def work(mesh):
        own = logits[:, 3 * mesh.coordinate("tp") :][:, :3].contiguous().requires_grad_()
        losses = token_losses(own, targets, mesh.axis("tp"), 6)
        losses.sum().backward()
        assert losses.dtype == torch.float32
        assert own.grad.dtype == dtype
        return losses

    for losses in on_mesh(work, tp=2):
        torch.testing.assert_close(losses, expected)


def test_the_loss_of_hugging_face_models():
    sizes, (inputs, _) = config(), batch()
    labels = inputs.clone()
    labels[:, 2:5] = -100
    targets = causal_lm_targets(labels)
    expected = causal_lm_loss(build(sizes)(inputs), targets).detach()

    def work(mesh):
        return causal_lm_loss(pl.parallelize(build(sizes), mesh)(inputs), targets)

    for loss in on_mesh(work, tp=2):
        torch.testing.assert_close(loss.detach(), expected, rtol=1e-12, atol=0)


def test_the_backward_keeps_no_copy_of_the_logits():
    sizes, (inputs, targets) = config(vocabulary_size=30), batch()

    def work(mesh):
        model = pl.parallelize(build(sizes), mesh)
        logits, kept = model(inputs), set()
        block = logits.untyped_storage().data_ptr()

        def keep(tensor):
            if tensor.numel() >= logits.numel():
                kept.add(tensor.untyped_storage().data_ptr())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss_fn(logits, targets)
        assert kept == {block}

    on_mesh(work, tp=2)


@pytest.mark.parametrize(
    "use", ["softmax", "argmax", "max", "subtraction", "label_smoothing", "probabilities", "chunk"]
)
def test_uses_that_would_see_a_part_of_the_vocabulary_are_refused(use):
    inputs, targets = batch()

    def work(mesh):
        logits = pl.parallelize(build(config()), mesh)(inputs)
        flat, ids = logits.flatten(0, 1), targets.flatten()
        uses = {
            "softmax": lambda: logits.softmax(-1),
            "argmax": lambda: logits.argmax(-1),
            "max": lambda: logits.max(-1),
            "subtraction": lambda: logits - torch.ones(()),
            "label_smoothing": lambda: F.cross_entropy(flat, ids, label_smoothing=0.1),
            "probabilities": lambda: F.cross_entropy(flat, torch.zeros(flat.shape)),
            "chunk": lambda: logits.chunk(2, -1),
        }
        with pytest.raises(InputError, match=r"shared by the vocabulary") as error:
            uses[use]()
        assert "\n" not in str(error.value)

    on_mesh(work, tp=2)
