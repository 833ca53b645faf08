"""Hugging Face decoders with random weights: cut into stages and slices they are the models that they were."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.autograd.split_backward import backward_input
from pipeloom.errors import InputError, SplitError
from pipeloom.models.huggingface import causal_lm_loss, causal_lm_targets
from pipeloom.slicing import SliceContext, make_sliceable
from pipeloom.split import split
from pipeloom.split.huggingface import DECODERS
from tests.cpu.pairwise import in_turn, of_grid

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the extra 'huggingface')")

LENGTH = 41
CUTS = {1: [0, 41], 2: [0, 33, 41], 3: [0, 1, 25, 41], 5: [0, 9, 10, 20, 33, 41], 7: [0, 12, 20, 26, 31, 35, 39, 41]}
SMALL = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {
    "vocab_size": 31,
    "n_embd": 16,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 64,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DROPOUT = {
    "llama": {"attention_dropout": 0.2},
    "gpt2": {"resid_pdrop": 0.2, "embd_pdrop": 0.1, "attn_pdrop": 0.3},
}
FAMILIES = ["llama", "gpt2"]


def build(kind: str, recompute: str | None = None, dtype: torch.dtype = torch.float64, **changes):
    config = transformers.AutoConfig.for_model(kind, **{**(GPT2 if kind == "gpt2" else SMALL), **changes})
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, 0.3) if parameter.dim() > 1 else parameter.normal_("bias" not in name, 0.1)
    model = model.to(dtype).train()
    if recompute:
        model.activation_checkpointing_enable({"use_reentrant": recompute == "reentrant"})
    return model


def tokens(batch: int, length: int = LENGTH) -> Tensor:
    return torch.randint(3, 31, (batch, length), generator=torch.Generator().manual_seed(batch))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= tolerance * gradient.norm(), name


def chain(modules, value):
    for module in modules:
        value = module(value)
    return value


def cut_tree(value, start, end):
    if isinstance(value, dict):
        return {name: cut_tree(part, start, end) for name, part in value.items()}
    return value[:, start:end] if value.dim() > 1 else value


def sliced_step(stages, inputs, targets, ends: list[int], *, split_backward: bool = False) -> Tensor:
    """Every slice through all stages, each with a context of its own, and back; the logits."""
    contexts = [SliceContext(seed=(5, stage)) for stage in range(len(stages))]
    runs, outputs = [], []
    for place in [(i, a, b, ends[-1]) for i, (a, b) in enumerate(pairwise(ends))]:
        _, start, end, length = place
        value, graph = cut_tree(inputs, start, end), []
        for stage, context in zip(stages, contexts, strict=True):
            if graph:
                hidden = value["hidden_states"] if isinstance(value, dict) else value
                leaf = hidden.detach().requires_grad_()
                graph.append((hidden, leaf))
                value = {**value, "hidden_states": leaf} if isinstance(value, dict) else leaf
            else:
                graph.append((None, None))
            with context.slice(*place):
                value = stage(value)
        outputs.append(value.logits.detach())
        loss = causal_lm_loss(value, cut_tree(targets, start, end)) * ((end - start) / length)
        runs.append((place, graph, loss))
    waiting = []
    while runs:
        place, graph, root = runs.pop()
        gradient = torch.ones_like(root)
        for context, (output, leaf) in zip(reversed(contexts), reversed(graph), strict=True):
            leaves = [] if leaf is None else [leaf]
            with context.slice(*place):
                if split_backward:
                    edge = torch.autograd.graph.get_gradient_edge(root)
                    found, weights = backward_input([edge], [gradient], leaves)
                    waiting.append(weights)
                else:
                    root.backward(gradient)
                    found = [leaf.grad for leaf in leaves]
            if leaf is not None:
                root, gradient = output, found[0]
    for weights in waiting:
        weights.accumulate()
    assert all(context.num_bytes == 0 for context in contexts) or isinstance(inputs, dict)
    return torch.cat(outputs, 1)


# Cut into stages, whole sequences


def _padded(kind: str) -> Any:
    """Attention masks pass through the stages of all families alike, so two families have them in every run."""
    marks = () if kind in FAMILIES else pytest.mark.whole_grid
    return pytest.param(kind, True, marks=marks, id=f"{kind}-padding")


@pytest.mark.parametrize(("kind", "masked"), [*((kind, False) for kind in DECODERS), *map(_padded, DECODERS)])
def test_stages_are_the_uncut_model(kind, masked):
    """Bitwise, names too; tied weights once."""
    changes = {"sliding_window": 9} if kind == "mistral" else {}
    model = build(kind, tie_word_embeddings=True, **changes)
    x = tokens(2)
    inputs = {"input_ids": x, "attention_mask": torch.ones_like(x)} if masked else x
    if masked:
        inputs["attention_mask"][1, -7:] = 0
    whole = model(**inputs) if masked else model(x)
    whole.logits.square().sum().backward()
    expected = gradients(model)
    for num_stages, cut, in_parts in [(1, "layers", True), (2, [1, 3], False), (5, "parameters", kind == "gpt2")]:
        stages = split(model, num_stages, cut=cut, parts_of_sequences=in_parts)
        logits = chain(stages.modules, inputs).logits
        assert torch.equal(logits, whole.logits)
        logits.square().sum().backward()
        assert_same(gradients(model), expected, 0)
        names = {name for module in stages.modules for name in module.state_dict()}
        assert names == model.state_dict().keys()
        assert stages.parameter_names == tuple(expected)
        embedding = "transformer.wte.weight" if kind == "gpt2" else "model.embed_tokens.weight"
        assert [t.names for t in stages.tied] == [(embedding, "lm_head.weight")] * (num_stages > 1)


@pytest.mark.parametrize(("kind", "schedule"), in_turn(FAMILIES, ["1f1b", "zb-h1"]))
def test_a_pipeline_trains_it_as_the_model_trains_itself(kind, schedule):
    """Loss and gradients of the model's own forward, with labels that do not count."""
    model = build(kind, "recompute", tie_word_embeddings=True)
    x = tokens(3)
    labels = x.clone()
    labels[0, 5:30] = -100
    mask = torch.ones_like(x)
    mask[2, 30:] = 0
    expected_loss = causal_lm_loss(model(x, attention_mask=mask).logits, causal_lm_targets(labels))
    expected_loss.backward()
    expected = gradients(model)
    own = model.float()(x, attention_mask=mask, labels=labels).loss  # it computes losses in float32
    assert own.item() == pytest.approx(expected_loss.item(), rel=1e-5)
    model.double()
    built = pl.schedules.build(schedule, num_ranks=2, num_microbatches=2)
    with pl.Pipeline(model, built, loss_fn=causal_lm_loss, cut=[3, 1]) as pipe:
        loss = pipe.step({"input_ids": x, "attention_mask": mask}, causal_lm_targets(labels))
        assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-12)
        found = {}
        for name, parameter in pipe.named_parameters():
            found[name] = parameter.grad
        assert_same(found, expected)


def test_cut_by_time_runs_every_layer():
    model = build("gpt2")
    x = tokens(2)
    stages = split(model, 3, cut="time", sample=(x, causal_lm_targets(x)), loss_fn=causal_lm_loss)
    assert torch.equal(chain(stages.modules, x).logits, model(x).logits)


@pytest.mark.parametrize("kind", FAMILIES)
def test_what_cannot_be_cut_is_refused_in_a_line(kind):
    with pytest.raises(SplitError, match=r"with add_cross_attention=True.*=False\.$"):
        split(build("gpt2", add_cross_attention=True), 2, parts_of_sequences=True)
    albert = transformers.AlbertModel(transformers.AlbertConfig(**{**SMALL, "num_hidden_layers": 2}))
    with pytest.raises(
        SplitError, match=r"^AlbertModel with model_type='albert' .*example=.*register_layout, or layers=\.$"
    ):
        split(albert, 2)
    assert split(albert, 1).modules == [albert]
    stage = split(build(kind), 1, parts_of_sequences=True).modules[0]
    with pytest.raises(InputError, match="dict of 'words'"):
        stage({"words": tokens(1)})
    with pytest.raises(InputError, match=r"Pass causal_lm_targets\(labels\)"):
        causal_lm_loss(stage(tokens(1)), tokens(1))


# Slices


BACKWARDS = [(None, False), (None, True), ("recompute", False), ("recompute", True), ("reentrant", False)]


@pytest.mark.parametrize(("kind", "batch", "backward"), of_grid(FAMILIES, (1, 3), BACKWARDS))
def test_gradients_of_any_slices_are_those_of_the_uncut_model(kind, batch, backward):
    recompute, split_backward = backward
    model = build(kind, recompute, tie_word_embeddings=True)
    x = tokens(batch)
    targets = causal_lm_targets(x)
    logits = model(x, use_cache=False).logits
    causal_lm_loss(logits, targets).backward()
    expected = gradients(model)
    for number, ends in CUTS.items():
        stages = split(model, 1 + number % 3, parts_of_sequences=True).modules
        for stage in stages:
            make_sliceable(stage)
        found = sliced_step(stages, x, targets, ends, split_backward=split_backward)
        torch.testing.assert_close(found, logits, rtol=1e-11, atol=1e-12)
        assert_same(gradients(model), expected)
    causal_lm_loss(model(x, use_cache=False).logits, targets).backward()  # the model itself works as before
    assert_same(gradients(model), expected, 0)


@pytest.mark.parametrize(("kind", "recompute"), in_turn(FAMILIES, [None, "recompute"]))
def test_dropout_masks_do_not_depend_on_the_slices(kind, recompute):
    x = tokens(2)
    targets = causal_lm_targets(x)
    plain = build(kind, **DROPOUT[kind])
    (stage,) = split(plain, 1, parts_of_sequences=True).modules
    make_sliceable(stage)
    logits = sliced_step([stage], x, targets, CUTS[1])
    expected = gradients(plain)
    assert not torch.allclose(logits, build(kind)(x).logits)
    model = build(kind, recompute, **DROPOUT[kind])
    (stage,) = split(model, 1, parts_of_sequences=True).modules
    make_sliceable(stage)
    for ends in CUTS.values():
        found = sliced_step([stage], x, targets, ends)
        torch.testing.assert_close(found, logits, rtol=1e-10, atol=1e-11)
        assert_same(gradients(model), expected, 1e-11)


VARIANTS = [
    *((kind, {}, False) for kind in DECODERS if kind not in FAMILIES),
    ("llama", {}, True),
    ("gpt2", {}, True),
    ("mistral", {"sliding_window": 7}, True),
    ("ministral", {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"] * 2}, False),
    ("gpt2", {"attn_implementation": "eager"}, False),
    ("gpt2", {"attn_implementation": "eager"}, True),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, False),
]


@pytest.mark.parametrize(("kind", "changes", "masked"), VARIANTS, ids=str)
def test_masks_windows_and_relatives(kind, changes, masked):
    model = build(kind, **changes)
    x = tokens(2)
    labels, inputs = x.clone(), x
    if masked:
        mask = torch.ones_like(x)
        mask[0, -15:] = 0
        labels[0, -15:] = -100
        inputs = {"input_ids": x, "attention_mask": mask}
    targets = causal_lm_targets(labels)
    logits = model(**inputs).logits if masked else model(x).logits
    causal_lm_loss(logits, targets).backward()
    expected = gradients(model)
    stages = split(model, 2, parts_of_sequences=True).modules
    for stage in stages:
        make_sliceable(stage)
    tolerance = 1e-5 if kind in ("gemma", "helium") else 1e-11  # their norms compute weights in float32
    for ends in (CUTS[1], CUTS[5]):
        found = sliced_step(stages, inputs, targets, ends)
        torch.testing.assert_close(found, logits, rtol=tolerance, atol=tolerance)
        assert_same(gradients(model), expected, tolerance)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "uses 'dynamic'.*Train on whole sequences",
        ),
        ({"attn_implementation": "flex_attention"}, r"uses 'flex_attention'.*attn_implementation='sdpa'\.$"),
    ],
    ids=str,
)
def test_what_cannot_be_sliced_is_refused_in_a_line(changes, said):
    with pytest.raises(InputError, match=said) as error:
        make_sliceable(split(build("llama", **changes), 2, parts_of_sequences=True).modules[1])
    assert "\n" not in str(error.value)
    model = build("llama")
    model.model.layers[2].mlp = nn.Sequential(model.model.layers[2].mlp, nn.Conv1d(LENGTH, LENGTH, 1))
    with pytest.raises(InputError, match=r"'model\.layers\.2\.mlp\.1' \(Conv1d\) is a convolution"):
        make_sliceable(split(model, 2, parts_of_sequences=True).modules[1])
