"""Models that compute their own loss from labels in the batch: heads, uneven labels, replicas, accumulation."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipeloom as pl
from pipeloom.errors import InputError, RunError
from pipeloom.models import materialize
from pipeloom.models.huggingface import causal_lm_loss, causal_lm_targets
from pipeloom.training.losses.labels import NoticedNumber

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the extra 'huggingface')")

SIZES = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "pad_token_id": 0,
}
LLAMA = {**SIZES, "num_key_value_heads": 2}
BERT = {**SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
EXPERTS = {"experts_implementation": "eager", "output_router_logits": True}
CLASSES = torch.tensor([0, 1, 2, 1, 0])


def token_batch() -> dict[str, Tensor]:
    """Labels spread unevenly: sample 1 has none that counts."""
    ids = torch.randint(3, 31, (5, 9), generator=torch.Generator().manual_seed(1))
    mask, labels = torch.ones_like(ids), ids.clone()
    mask[4, 5:] = 0
    labels[0, 2:], labels[1], labels[4, 5:] = -100, -100, -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def make(name: str, **changes) -> nn.Module:
    kind = getattr(transformers, name)
    sizes = {**(BERT if name.startswith("Bert") else LLAMA), **changes}
    torch.manual_seed(2)
    return kind(kind.config_class(**sizes)).double().train()


def check(
    model: nn.Module, batch: dict[str, Tensor], expected: tuple[float, dict[str, Tensor]] | None = None, **options
):
    """Loss and gradients of a step beside those of the model on the whole batch."""
    loss, gradients = whole(model, batch) if expected is None else expected
    ranks, num_microbatches = options.pop("ranks", 2), options.pop("m", 5)
    schedule = pl.schedules.build(options.pop("schedule", "1f1b"), num_ranks=ranks, num_microbatches=num_microbatches)
    with pl.Pipeline(model, schedule, **options) as pipe:
        found = pipe.step(batch)
        assert found.item() == pytest.approx(loss, rel=1e-5)  # transformers computes losses in float32
        for name, parameter in pipe.named_parameters():
            if name in gradients:
                torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-5, atol=1e-8)


def whole(model: nn.Module, batch: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    loss = model(**batch).loss
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.item(), found


@pytest.mark.parametrize(
    ("name", "changes", "labels"),
    [
        ("LlamaForCausalLM", {"tie_word_embeddings": True}, None),
        ("LlamaForSequenceClassification", {"num_labels": 3}, {"labels": CLASSES}),
        ("LlamaForTokenClassification", {"num_labels": 31, "classifier_dropout": 0.0}, None),
        ("LlamaForQuestionAnswering", {}, {"start_positions": CLASSES, "end_positions": CLASSES + 2}),
        ("GPT2LMHeadModel", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "eos_token_id": 2}, None),
    ],
)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_heads_train_with_their_own_loss(name, changes, labels, schedule):
    """Also a micro-batch without labels that count, and a batch that is no dict."""
    batch = token_batch()
    if labels is not None:
        del batch["labels"]
    check(make(name, **changes), transformers.BatchEncoding({**batch, **(labels or {})}), schedule=schedule)


def test_registered_layouts():
    """A family without a plan, with several heads."""
    pl.register_layout(transformers.BertModel, ["embeddings", "encoder.layer.*", "pooler"])
    batch = token_batch()
    check(make("BertForMaskedLM"), batch)
    check(make("BertForSequenceClassification", num_labels=3), {**batch, "labels": CLASSES})
    pl.register_layout(transformers.ViTModel, ["embeddings", "layers.*", "layernorm"])
    torch.manual_seed(2)
    sizes = {name: BERT[name] for name in BERT if "size" in name or "num" in name or "prob" in name}
    config = transformers.ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=3)
    pixels = torch.randn(5, 3, 8, 8, dtype=torch.float64)
    check(transformers.ViTForImageClassification(config).double(), {"pixel_values": pixels, "labels": CLASSES})
    with pytest.raises(InputError, match="must be a subclass of"):
        pl.register_layout("BertModel", ["embeddings"])
    with pytest.raises(InputError, match="must be a list of module names"):
        pl.register_layout(transformers.BertModel, "embeddings")


def test_losses_of_routers_over_all_layers_count_once():
    """Router logits of all stages reach the last; the model's own loss with its balance loss comes out."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 4, **EXPERTS}
    model = make("Qwen3MoeForCausalLM", router_aux_loss_coef=0.5, **sizes)
    check(model, token_batch(), m=1)
    with pl.Pipeline(model, pl.schedules.build("1f1b", num_ranks=2, num_microbatches=1)) as pipe:
        output = pipe.forward(token_batch())
        pipe.step(token_batch())
        metrics = pipe.metrics()
    own = model(**token_batch())
    assert metrics == {"aux_loss": pytest.approx(own.aux_loss.item(), rel=1e-6)}
    assert len(output.router_logits) == 4
    torch.testing.assert_close(output.aux_loss.reshape(()), own.aux_loss)


def test_replicas_and_several_steps_weigh_by_labels():
    """Each replica, and each of two steps, has another number of labels."""
    model, batch = make("LlamaForCausalLM"), token_batch()
    loss, gradients = whole(model, batch)
    parts = [{name: t[:2] for name, t in batch.items()}, {name: t[2:] for name, t in batch.items()}]
    schedule = pl.schedules.build("1f1b", num_ranks=2, num_microbatches=2)

    def run():
        mesh = pl.Mesh(pp=2, dp=2)
        with pl.Pipeline(copy.deepcopy(model), schedule, mesh=mesh) as pipe:
            found = pipe.step(parts[mesh.coordinate("dp")])
            return found.item(), {name: p.grad.clone() for name, p in pipe.named_parameters()}

    def run_with_targets():
        mesh = pl.Mesh(pp=2, dp=2)
        part = parts[mesh.coordinate("dp")]
        inputs = {name: part[name] for name in ("input_ids", "attention_mask")}
        with pl.Pipeline(copy.deepcopy(model), schedule, mesh=mesh, loss_fn=causal_lm_loss) as pipe:
            found = pipe.step(inputs, causal_lm_targets(part["labels"]))
            return found.item(), {name: p.grad.clone() for name, p in pipe.named_parameters()}

    for found, own in (*pl.run_threads(4, run), *pl.run_threads(4, run_with_targets)):
        assert found == pytest.approx(loss, rel=1e-5)
        for name, gradient in own.items():
            torch.testing.assert_close(gradient, gradients[name], rtol=1e-5, atol=1e-8)
    number = int((batch["labels"][:, 1:] != -100).sum())
    with pl.Pipeline(model, schedule) as pipe:
        total = sum(pipe.step({**part, "num_items_in_batch": torch.tensor(number)}).item() for part in parts)
        assert total == pytest.approx(loss, rel=1e-5)
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-5, atol=1e-8)


def test_a_loss_may_take_its_number_of_labels_as_a_keyword_argument():
    def loss_function(logits, labels, vocab_size, num_items_in_batch=None, **_):
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        number = (labels != -100).sum() if num_items_in_batch is None else num_items_in_batch
        return torch.div(input=total, other=number)

    model = make("LlamaForCausalLM")
    model.loss_function = loss_function
    check(model, token_batch())


def test_a_forward_that_passes_all_arguments_on_is_checked_without_a_cache():
    class Passing(transformers.LlamaForCausalLM):
        def forward(self, *args, **settings):
            return super().forward(*args, **settings)

    torch.manual_seed(2)
    check(Passing(transformers.LlamaConfig(**LLAMA)).double().train(), token_batch(), check=token_batch())


@pytest.mark.parametrize("schedule", [pytest.param("1f1b", marks=pytest.mark.whole_grid), "zb-v"])
def test_encoder_decoders_weigh_by_labels(schedule):
    """Also where stages between the first and the last pass `num_items_in_batch` on, which the model does not use."""
    sizes = {
        "vocab_size": 31,
        "d_model": 16,
        "d_kv": 4,
        "d_ff": 24,
        "num_layers": 3,
        "num_heads": 4,
        "dropout_rate": 0.0,
    }
    torch.manual_seed(2)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0)).double()
    check(model.train(), token_batch(), schedule=schedule, ranks=3)


def test_a_number_is_used_by_arithmetic_and_not_by_copies():
    number = NoticedNumber.of(torch.tensor(5.0))
    assert (number.dtype, number.device.type, number.shape) == (torch.float32, "cpu", ())
    copied = number.to(torch.float64).detach()
    asked = (number.is_inference(), number.dim(), number.size(), number.numel(), torch.is_floating_point(number))
    assert asked == (False, 0, (), 1, True)
    assert not number.was_read
    assert type(number.to("meta")) is Tensor
    assert not number.was_read
    assert type(torch.tensor(10.0) / copied) is Tensor
    assert number.was_read
    assert copied.was_read


def test_what_has_no_loss_is_told():
    model = make("LlamaForCausalLM")
    batch = token_batch()
    with pl.Pipeline(model, pl.schedules.build("1f1b", num_ranks=2, num_microbatches=2)) as pipe:
        expected = pipe.step(batch)
        assert torch.equal(pipe.evaluate(batch), expected)
        labels = batch.pop("labels")
        with pytest.raises(InputError, match="the batch has no labels, and the pipeline no loss_fn"):
            pipe.step(batch)
        assert torch.equal(pipe.step(batch, labels), expected)
        assert torch.equal(pipe.step({**batch, "position_ids": torch.arange(9).expand(5, 9)}, labels), expected)
        assert set(pipe.forward(batch)) == {"logits"}
        with pytest.raises(
            InputError, match=r"labels: \[\[.*: must be a tensor\. Convert it, or make the batch with return"
        ):
            pipe.step({**batch, "labels": labels.tolist()})
        assert torch.equal(pipe.step({**batch, "labels": labels, "return_dict": False}), expected)
    with (
        pl.Pipeline(
            model, pl.schedules.build("1f1b", num_ranks=2, num_microbatches=2), loss_fn=F.cross_entropy
        ) as pipe,
        pytest.raises(RunError, match=r"The model returns a CausalLMOutputWithPast with logits: use output\.logits"),
    ):
        pipe.step(batch, labels)
    sliced = pl.schedules.build("terapipe", num_ranks=2, num_microbatches=2, num_slices=2)
    with pl.Pipeline(model, sliced) as pipe, pytest.raises(InputError, match="its own from whole sequences, not with"):
        pipe.step(batch, labels)

    def shares_sequences() -> None:
        mesh = pl.Mesh(tp=2)
        own = pl.parallelize(copy.deepcopy(model), mesh, sequence=True)
        with pl.Pipeline(own, pl.schedules.gpipe(num_ranks=1, num_microbatches=2), mesh=mesh) as pipe:
            pipe.step({**batch, "labels": labels})

    with pytest.raises(InputError, match="its own from whole sequences, not with"):
        pl.run_threads(2, shares_sequences)
    with pytest.raises(InputError, match="step\\(\\) needs a loss"):
        pl.Pipeline(
            nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), pl.schedules.build("1f1b", num_ranks=2, num_microbatches=2)
        ).step(torch.ones(2, 2))


@pytest.mark.parametrize("name", ["Llama", "Gemma3"])
def test_buffers_of_transformers_materialize(name):
    """Rotary tables, and the scale of Gemma's embedding."""
    text = "Text" if name == "Gemma3" else ""
    config, model_class = (getattr(transformers, name + kind) for kind in (f"{text}Config", "ForCausalLM"))
    whole = model_class(config(**LLAMA, head_dim=8))
    with torch.device("meta"):
        stages = pl.split.split(model_class(config(**LLAMA, head_dim=8)), 2)
    for stage in stages.modules:
        materialize(stage, seed=1)
        for buffer, value in stage.named_buffers():
            assert torch.equal(value, whole.get_buffer(buffer)), buffer


def test_torchrun_without_a_process_group_is_refused(monkeypatch):
    """Each process would train a model of its own."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    schedule = pl.schedules.build("1f1b", num_ranks=2, num_microbatches=2)
    with pytest.raises(InputError, match="WORLD_SIZE=2: torchrun started several processes"):
        pl.Pipeline(model, schedule)
    pl.Pipeline(model, schedule, transport="loopback").close()
