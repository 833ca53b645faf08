"""Hugging Face decoders whose stages several processes share: training as in one process, weights for transformers.

Everything is compared in float64. Norms of the Llama family compute in float32, from inputs that differ in their last
bits; as long as these round alike, results agree to 1e-12.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import pipeloom as pl
from pipeloom.engine.binders import sequence_slices
from pipeloom.models.huggingface import causal_lm_loss, causal_lm_targets
from pipeloom.parallel.placed import cut_blocks, placed_block
from pipeloom.slicing import SliceContext
from pipeloom.train import checkpoint
from pipeloom.train.checkpoint.convert import convert
from pipeloom.train.process_group import Group
from tests.cpu.ranks import run_ranks
from tests.cpu.tensor_cases import Result, assert_equal, joined
from tests.cpu.test_huggingface import DROPOUT, build

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the extra 'huggingface')")

S, UPDATES = 16, 2
FORMS: dict[str, tuple[str, dict[str, Any]]] = {  # the vocabulary, 31, is divided by no degree
    "llama": ("llama", {"attention_bias": True}),
    "one key head": ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": 5}),
    "qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "olmo2": ("olmo2", {}),
    "apertus": ("apertus", {}),
    "gemma": ("gemma", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "gpt2": ("gpt2", {}),
}


class Case(NamedTuple):
    """A model and how it runs."""

    form: str
    degrees: dict[str, int]
    padding: str = ""
    sequence: bool = False
    schedule: str = "1f1b"
    checkpointed: str | None = None
    options: Mapping[str, Any] = MappingProxyType({})  # of the Pipeline
    dtype: torch.dtype = torch.float64
    changes: Mapping[str, Any] = MappingProxyType({})

    def build(self, *, alone: bool = False):
        kind, changes = FORMS[self.form]
        return build(kind, None if alone else self.checkpointed, self.dtype, **changes, **self.changes)


class Trained(NamedTuple):
    """What one process found. Arrays travel between processes."""

    losses: list[float]
    gradients: list[Any]
    state: dict[str, Any]
    held: list[Any]
    logits: Any


def batch(padding: str) -> tuple[Any, Any]:
    ids = torch.randint(3, 31, (4, S), generator=torch.Generator().manual_seed(1))
    if not padding:
        return ids, causal_lm_targets(ids)
    mask = (torch.arange(S) < torch.tensor([[S], [11], [5], [S - 1]])).long()
    mask = mask.flip(1) if padding == "left" else mask
    return {"input_ids": ids, "attention_mask": mask}, causal_lm_targets(ids.masked_fill(mask == 0, -100))


def train(rank: int, case: Case, directory: str | None = None) -> Trained:
    inputs, targets = batch(case.padding)
    schedule = pl.schedules.build(case.schedule, num_ranks=case.degrees.get("pp", 1), num_microbatches=2)
    torch.manual_seed(11)
    with pl.Mesh(**case.degrees) as mesh:
        model = case.build()
        if mesh.degree("tp") > 1:
            pl.parallelize(model, mesh, sequence=case.sequence)
        with pl.Pipeline(model, schedule, loss_fn=causal_lm_loss, mesh=mesh, **case.options) as pipe:
            optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
            losses, gradients = [], []
            for update in range(UPDATES):
                losses.append(pipe.step(inputs, targets).item())
                gradients = gradients if update else _pieces(pipe, gradients=True)
                optimizer.step()
                optimizer.zero_grad()
            if directory is not None:
                blocks = cut_blocks(pipe.named_parameters())
                checkpoint.save(
                    directory,
                    UPDATES,
                    model=pipe.state.main_state(),
                    blocks=blocks,
                    exchange=Group(rank, 4, torch.device("cpu"), mesh),
                    ties=pipe.state.ties,
                )
            state = {name: value.numpy() for name, value in pipe.state_dict().items()}
            logits = pipe.eval().forward(inputs)
            return Trained(losses, gradients, state, _pieces(pipe), None if logits is None else logits.logits.numpy())


def _pieces(pipe: pl.Pipeline, *, gradients: bool = False) -> list[Any]:
    """Name, block and values of all parameters of this process."""
    found = []
    for name, parameter in pipe.named_parameters():
        block, value = placed_block(parameter), parameter.grad if gradients else parameter.detach()
        assert value is not None, name
        found.append((name, None if block is None else tuple(block), value.numpy().copy()))
    return found


def whole(found: list[list[Any]]) -> dict[str, Tensor]:
    """Full tensors by name. What several processes hold must be equal."""
    return joined([(name, block, torch.from_numpy(array)) for name, block, array in own] for own in found)


def alone(case: Case) -> tuple[Result, list[float]]:
    """In one process: loss and gradients, and the losses of all updates.

    Call it before processes start: they have the model's code loaded then.
    """
    model, (inputs, targets) = case.build(alone=True), batch(case.padding)
    inputs = inputs if isinstance(inputs, dict) else {"input_ids": inputs}
    optimizer, losses, gradients = torch.optim.AdamW(model.parameters(), lr=0.01), [], {}
    for _ in range(UPDATES):
        loss = causal_lm_loss(model(**inputs, use_cache=False).logits, targets)
        loss.backward()
        losses.append(loss.item())
        gradients = gradients or {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    return Result(losses[0], gradients, {}), losses


def assert_loads(case: Case, found: list[Trained], directory: Any) -> None:
    """The weights that the processes gather are the trained ones, and transformers reads them and computes the same."""
    state = {name: torch.from_numpy(value) for each in found for name, value in each.state.items()}
    model = case.build(alone=True)
    model.load_state_dict(state)  # strict
    model.save_pretrained(directory)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=case.dtype).eval()
    named = dict(loaded.named_parameters())
    full = whole([each.held for each in found])
    assert full.keys() == named.keys()
    assert all(torch.equal(value, named[name]) for name, value in full.items())
    inputs, _ = batch(case.padding)
    with torch.no_grad():
        logits = loaded(**(inputs if isinstance(inputs, dict) else {"input_ids": inputs}), use_cache=False).logits
    outputs = [torch.from_numpy(each.logits) for each in found if each.logits is not None]
    assert outputs
    real = inputs["attention_mask"].bool() if isinstance(inputs, dict) else torch.ones_like(inputs, dtype=torch.bool)
    for output in outputs:
        error = (output - logits)[real].abs().max() / logits.abs().max()
        assert error < (1e-12 if case.dtype == torch.float64 else 1e-5)


PP_TP, PP_CP, CP_TP = {"pp": 2, "tp": 2}, {"pp": 2, "cp": 2}, {"cp": 2, "tp": 2}
FULL, SELECTIVE, ULYSSES = {"recompute": "full"}, {"recompute": "selective"}, {"context": "ulysses"}
CASES = [
    Case("llama", PP_TP, "right", sequence=True, options=FULL),
    Case("one key head", PP_TP, sequence=True, schedule="zb-h1"),
    Case("qwen2 tied", PP_TP, "left", sequence=True),
    Case("gpt2", PP_TP, "right", sequence=True, options=SELECTIVE),
    Case("mistral", PP_TP, sequence=True, checkpointed="no"),
    Case("apertus", PP_TP, sequence=True),
    Case("one key head", PP_CP, "left", options=FULL),
    Case("qwen2", PP_CP, "right", options=ULYSSES | SELECTIVE),
    Case("qwen3", PP_CP, schedule="zb-h1"),
    Case("mistral", PP_CP, options=ULYSSES, checkpointed="no"),
    Case("gpt2", PP_CP, "right", checkpointed="reentrant"),
    Case("llama", CP_TP, "right", sequence=True),
    Case("gpt2", CP_TP, "left", sequence=True, options=ULYSSES),
]
MORE = [  # in whole grids: families on tensor-parallel ranks are in test_tensor_huggingface, the rest is above in part
    Case("qwen3", PP_TP, sequence=True, schedule="zb-h1"),
    Case("olmo2", PP_TP, sequence=True),
    Case("gpt2", PP_TP, schedule="zb-h1"),
    Case("llama", PP_CP, "right"),
    Case("llama", PP_CP, schedule="zb-h1", options=ULYSSES),
    Case("gpt2", PP_CP, "left", options=ULYSSES),
]


def _name(case: Case) -> str:
    axes = "".join(f"{axis}{degree}" for axis, degree in case.degrees.items())
    words = (case.form, axes, case.options.get("context", ""), case.padding, "sequence" if case.sequence else "")
    return " ".join(word for word in words if word)


@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.whole_grid) for case in MORE)], ids=_name
)
def test_training_and_weights_are_those_of_one_process(case, tmp_path):
    (expected, losses), found = alone(case), run_ranks(train, 4, case)
    for each in found:
        torch.testing.assert_close(each.losses, losses, rtol=1e-6, atol=0)
    gradients = whole([each.gradients for each in found])
    assert_equal(Result(found[0].losses[0], gradients, {}), expected)
    assert_loads(case, found, tmp_path)


def test_gemma_scales_embeddings_in_parts_of_the_vocabulary(tmp_path):
    """Its norms multiply by 1 + weight in float32."""
    case = Case("gemma", PP_TP, sequence=True)
    (expected, _), found = alone(case), run_ranks(train, 4, case)
    assert_equal(Result(found[0].losses[0], whole([each.gradients for each in found]), {}), expected, 1e-6)
    assert_loads(case, found, tmp_path)


@pytest.mark.parametrize(
    "case",
    [Case("qwen2 tied", PP_TP, sequence=True), pytest.param(Case("llama", PP_CP), marks=pytest.mark.whole_grid)],
    ids=_name,
)
def test_updates_in_float32(case, tmp_path):
    case = case._replace(dtype=torch.float32)
    (_, losses), found = alone(case), run_ranks(train, 4, case)
    for each in found:
        torch.testing.assert_close(each.losses, losses, rtol=1e-5, atol=0)
    assert_loads(case, found, tmp_path)


def test_converted_checkpoints_load_in_transformers(tmp_path):
    case = Case("qwen2 tied", PP_TP, sequence=True)
    found = run_ranks(train, 4, case, tmp_path / "run")
    convert(tmp_path / "run" / f"checkpoint-{UPDATES}", tmp_path / "exported")
    case.build(alone=True).config.save_pretrained(tmp_path / "exported")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float64)
    full = whole([each.held for each in found])
    assert all(torch.equal(value, full[name]) for name, value in loaded.named_parameters())


@pytest.mark.parametrize("kind", [pytest.param("llama", marks=pytest.mark.whole_grid), "gpt2"])
def test_dropout_masks_are_those_of_unshared_stages(kind, monkeypatch):
    """Of attention weights too; each process has the part of its heads."""
    monkeypatch.setattr(sequence_slices, "SliceContext", lambda seed: SliceContext((7, *(seed or (0,))[1:])))
    case = Case(kind, PP_TP, sequence=True, options={"slices": [S]}, changes=DROPOUT[kind])
    found, apart = run_ranks(train, 4, case), run_ranks(train, 2, case._replace(degrees={"pp": 2}))
    results = [Result(each[0].losses[0], whole([rank.gradients for rank in each]), {}) for each in (found, apart)]
    assert_equal(*results)
    assert abs(found[0].losses[0] / alone(case._replace(changes={}))[1][0] - 1) > 1e-3
