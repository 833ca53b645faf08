"""Decoders of transformers on tensor-parallel ranks: their own plans, heads, biases, ties; weights that load again."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import pipeloom as pl
from tests.cpu.pairwise import in_turn
from tests.cpu.tensor_cases import assert_equal, batch, on_mesh, one_process, run

transformers = pytest.importorskip("transformers")

_LLAMA = {
    "vocab_size": 30,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
_GPT2 = {
    "vocab_size": 30,
    "n_embd": 16,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 16,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}


def configs():
    return {
        "llama": transformers.LlamaConfig(**_LLAMA, attention_bias=True),
        "llama tied": transformers.LlamaConfig(**{**_LLAMA, "num_key_value_heads": 1}, tie_word_embeddings=True),
        "qwen2": transformers.Qwen2Config(**_LLAMA),
        "qwen3": transformers.Qwen3Config(**_LLAMA, head_dim=8),
        "olmo2": transformers.Olmo2Config(**_LLAMA),
        "gpt2": transformers.GPT2Config(**_GPT2),
    }


def made(name):
    """In float64; norms of the Llama family compute in float32."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(configs()[name])
    model = model.double().train()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            draw = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(draw / 3 if parameter.dim() > 1 else 1.0 + draw / 5)
    return model


def loss_fn(output, targets):
    logits = output if isinstance(output, torch.Tensor) else output.logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Logits(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, ids):
        return self.inner(ids).logits


def reference(name):
    found = one_process(Logits(made(name)), loss_fn)
    return found._replace(gradients={name.removeprefix("inner."): g for name, g in found.gradients.items()})


@pytest.mark.parametrize(
    ("name", "sequence"), in_turn(["llama", "llama tied", "qwen2", "qwen3", "olmo2", "gpt2"], [False, True])
)
def test_decoders_in_pipelines_equal_one_process(name, sequence):
    models = [made(name) for _ in range(4)]  # transformers cannot be built in several threads at once
    found = run(models.pop, "zb-h1", pp=2, tp=2, sequence=sequence, loss=loss_fn)
    assert_equal(found, reference(name), 1e-12 if name == "gpt2" else 2e-6)


@pytest.mark.parametrize(("name", "sequence"), in_turn(["llama", "gpt2"], [False, True]))
def test_four_ranks_share_key_heads(name, sequence):
    models = [made(name) for _ in range(4)]
    found = run(models.pop, tp=4, sequence=sequence, loss=loss_fn)
    assert_equal(found, reference(name), 1e-12 if name == "gpt2" else 2e-6)


def test_the_plan_of_the_base_model_is_taken_as_it_is():
    """Its names are relative to the base model; the head is on all ranks."""
    models = [made("qwen3") for _ in range(2)]
    plan = dict(models[0].config.base_model_tp_plan)
    assert_equal(run(models.pop, plan=plan, tp=2, loss=loss_fn), reference("qwen3"), 2e-6)


def test_attention_and_mlp_modules_communicate_once():
    """4 all-reduces per layer, though q, k and v, and gate and up, are layers of their own."""
    models = [made("llama") for _ in range(2)]
    calls, _ = run(models.pop, tp=2, loss=loss_fn).traffic["all_reduce"]
    assert calls == 4 * (4 * 4 + 2)
    models = [made("llama") for _ in range(2)]
    traffic = run(models.pop, tp=2, sequence=True, loss=loss_fn).traffic
    assert traffic["reduce_scatter"][0] == 4 * (4 * 4 + 2)
    assert traffic["all_gather"][0] == 4 * (4 * 4 + 2 + 2 * 4 + 1 + 1)  # again; and the logits


@pytest.mark.parametrize("name", ["llama tied", "gpt2"])
def test_weights_load_in_transformers_again(name, tmp_path):
    models, (inputs, targets) = [made(name) for _ in range(4)], batch()
    schedule = pl.schedules.build("1f1b", num_ranks=2, num_microbatches=2)

    def work(mesh):
        model = pl.parallelize(models.pop(), mesh, sequence=True)
        with pl.Pipeline(model, schedule, loss_fn=loss_fn, mesh=mesh) as pipe:
            optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
            pipe.step(inputs, targets)
            optimizer.step()
            optimizer.zero_grad()
            return pipe.evaluate(inputs, targets), {key: value.clone() for key, value in pipe.state_dict().items()}

    found = on_mesh(work, pp=2, tp=2)
    state = {key: value for _, own in found for key, value in own.items()}
    whole = made(name)
    whole.load_state_dict(state)
    whole.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    loss = loss_fn(loaded(inputs).logits, targets)
    torch.testing.assert_close(found[0][0], loss.detach(), rtol=1e-6, atol=0)
