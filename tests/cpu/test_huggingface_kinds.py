"""Models of transformers without a pipeline plan enter without glue: encoders, decoders, vision, speech, mamba."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (the extra 'huggingface')")

import pipeloom as pl
from pipeloom.errors import SplitError
from pipeloom.split.layouts.layout import find_layout
from tests.cpu.huggingface_kinds import KINDS, RUNS, batch_of, difference, model_of

FEW = (
    "bert",
    "resnet",
    "deberta-v2",
    "t5",
    "whisper",
    "clip",
    "wav2vec2 (stable)",
    "mamba",
    "llava",
    "funnel",
    "xlm",
    "poolformer",
)


@pytest.mark.parametrize(("kind", "run"), [(kind, RUNS[index % 3]) for index, kind in enumerate(FEW)], ids=str)
def test_a_kind_trains_as_its_model_trains_itself(kind, run):
    assert difference(kind, [run]) <= 1e-12


def test_a_model_whose_layers_share_parameters_is_traced():
    import transformers

    sizes = {"vocab_size": 64, "embedding_size": 8, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
    dropout = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout_prob"), 0.0)
    config = transformers.AlbertConfig(num_hidden_layers=2, **sizes, **dropout)
    batch, model = batch_of("roberta"), transformers.AlbertForSequenceClassification(config).double().train()
    expected = model(**batch).loss
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    schedule = pl.schedules.build("zb-h1", num_ranks=2, num_microbatches=2)
    example = {name: value[:2] for name, value in batch.items()}
    with pytest.raises(SplitError, match="example="):
        pl.Pipeline(model, schedule)
    with pl.Pipeline(model, schedule, example=example, cut="parameters") as pipe:
        torch.testing.assert_close(pipe.step(batch), expected.detach())
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, gradients.get(name))


def test_outputs_of_layers_inside_of_a_traced_model():
    """transformers installs hooks in the first forward that returns outputs of its layers."""
    import transformers

    class Head(torch.nn.Module):
        def __init__(self):
            super().__init__()
            sizes = {"vocab_size": 64, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
            dropout = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
            self.body = transformers.BertModel(transformers.BertConfig(num_hidden_layers=2, **sizes, **dropout))
            self.head = torch.nn.Linear(16, 2)

        def forward(self, input_ids):
            hidden = self.body(input_ids, output_hidden_states=True).hidden_states
            return self.head(torch.cat((hidden[0], hidden[1]), -1)[:, 0])

    ids, classes = batch_of("bert")["input_ids"], torch.arange(6) % 2
    torch.manual_seed(0)
    model, loss_fn = Head().double(), torch.nn.functional.cross_entropy
    schedule = pl.schedules.build("zb-h1", num_ranks=2, num_microbatches=2)
    with pl.Pipeline(model, schedule, loss_fn=loss_fn, example=ids[:3], cut="parameters") as pipe:
        found = pipe.step(ids, classes)
        gradients = {name: p.grad.clone() for name, p in pipe.named_parameters() if p.grad is not None}
    assert not any(part._forward_hooks for part in model.modules())
    model.zero_grad()
    expected = loss_fn(model(ids), classes)
    expected.backward()
    torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=0)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and parameter.grad.any():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-9, atol=1e-14)


def test_a_model_that_hands_options_on_has_no_cache():
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "experts_implementation": "eager"}
    torch.manual_seed(0)
    config = transformers.GraniteMoeConfig(vocab_size=64, num_key_value_heads=1, **sizes, **experts)
    model, ids = transformers.GraniteMoeForCausalLM(config).double().eval(), batch_of("bert")["input_ids"]
    with pl.Pipeline(model, pl.schedules.build("gpipe", num_ranks=2, num_microbatches=2)) as pipe:
        found = pipe.forward({"input_ids": ids})
    assert set(found) == {"logits"}
    torch.testing.assert_close(found["logits"], model(ids).logits.detach(), rtol=1e-12, atol=1e-14)


def test_a_head_alone_behind_a_pooler(monkeypatch):
    monkeypatch.setattr("pipeloom.split.layouts.layout._REGISTERED", {})  # other tests register BertModel's
    kind = KINDS["bert"]._replace(model="BertForSequenceClassification", batch="text, classes")
    sizes = {**kind.config[1], "num_hidden_layers": 2}
    monkeypatch.setitem(KINDS, "bert with a head", kind._replace(config=("BertConfig", sizes)))
    assert difference("bert with a head", [(5, "1f1b")]) <= 1e-12


def test_a_model_with_memories_evaluates():
    import transformers

    sizes = {"vocab_size": 64, "d_model": 8, "n_layer": 3, "n_head": 2, "d_inner": 8}
    config = transformers.XLNetConfig(**sizes, dropout=0.0, summary_last_dropout=0.0)
    batch, model = batch_of("roberta"), transformers.XLNetForSequenceClassification(config).train()
    schedule = pl.schedules.build("gpipe", num_ranks=2, num_microbatches=3)
    with pl.Pipeline(model, schedule, check=batch) as pipe:
        torch.testing.assert_close(pipe.evaluate(batch), model.eval()(**batch).loss.detach())


def test_a_loop_that_reads_weights_of_layers_does_not_tell_their_order():
    """RWKV scales its blocks' weights, where it evaluates, in front of its embeddings."""
    from transformers import RwkvConfig, RwkvForCausalLM

    with torch.device("meta"):
        model = RwkvForCausalLM(RwkvConfig(vocab_size=8, hidden_size=8, num_hidden_layers=2))
    layout = find_layout(model)
    assert layout is not None
    assert layout.patterns == ("rwkv.embeddings", "rwkv.blocks.*", "rwkv.ln_out", "head")


ORDERS = {
    "jamba": ["model.embed_tokens", "model.layers.*", "model.final_layernorm", "lm_head"],
    "funnel": [
        *("funnel.embeddings", "funnel.encoder.blocks.0.*", "funnel.encoder.blocks.1.*", "funnel.decoder.layers.*"),
        "classifier",
    ],
    "modernbert": ["model.embeddings", "model.layers.*", "model.final_norm", "head", "decoder"],
    "xlm": [
        *("transformer.embeddings", "transformer.position_embeddings", "transformer.layer_norm_emb"),
        *(
            f"transformer.{name}.{index}"
            for index in range(4)
            for name in ("attentions", "layer_norm1", "ffns", "layer_norm2")
        ),
        "pred_layer",
    ],
    "poolformer": [
        *(f"poolformer.encoder.{name}" for i in range(4) for name in (f"patch_embeddings.{i}", f"block.{i}.*")),
        *("norm", "classifier"),
    ],
}


@pytest.mark.parametrize("kind", ORDERS)
def test_orders_of_lists_of_several_classes_and_of_lists_in_turn(kind):
    layout = find_layout(model_of(kind))
    assert layout is not None
    shared = {name for name in ORDERS[kind] if name in layout.everywhere}  # tied weights
    assert list(layout.patterns) == [name for name in ORDERS[kind] if name not in shared]


def test_weights_that_are_rescaled_in_an_evaluation_are_refused():
    from transformers import RwkvConfig, RwkvForCausalLM

    model = RwkvForCausalLM(RwkvConfig(vocab_size=8, hidden_size=8, num_hidden_layers=2, rescale_every=1))
    ids = torch.arange(8).view(4, 2)
    batch = {"input_ids": ids, "labels": ids}
    with pl.Pipeline(model, pl.schedules.build("gpipe", num_ranks=2, num_microbatches=2)) as pipe:
        pipe.step(batch)
        with pytest.raises(SplitError, match=r"^config.rescale_every=1: RwkvForCausalLM divides weights"):
            pipe.evaluate(batch)
        with pytest.raises(SplitError, match=r"^config.rescale_every=1: RwkvForCausalLM divides weights"):
            pipe.generate(ids, max_new_tokens=1)
        model.config.rescale_every = 0
        found = pipe.evaluate(batch).float()
    torch.testing.assert_close(found, model.eval()(**batch).loss.detach())


def test_layerdrop_of_a_configuration_is_refused():
    kind = KINDS["wav2vec2"]
    model = model_of("wav2vec2")
    model.config.layerdrop = 0.1
    schedule = pl.schedules.build("gpipe", num_ranks=2, num_microbatches=3)
    with (
        pl.Pipeline(model, schedule) as pipe,
        pytest.raises(SplitError, match=rf"^config.layerdrop=0.1: {kind.model} drops whole layers at random"),
    ):
        pipe.step(batch_of("wav2vec2"))


@pytest.mark.whole_grid
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(kind):
    assert difference(kind) <= 1e-12
