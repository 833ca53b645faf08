"""Models of transformers without a pipeline plan enter without glue: encoders, decoders, vision, speech, mamba."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (the extra 'huggingface')")

import pipeloom as pl
from pipeloom.errors import SplitError
from pipeloom.split.layouts.layout import find_layout
from tests.cpu.huggingface_kinds import KINDS, RUNS, batch_of, difference, model_of

FEW = ("bert", "resnet", "deberta-v2", "t5", "whisper", "clip", "wav2vec2 (stable)", "mamba", "llava")


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
