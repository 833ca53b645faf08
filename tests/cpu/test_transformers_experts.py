"""Experts of transformers, taken over: outputs and gradients of the original modules, under the same names."""

from __future__ import annotations

import copy

import pytest
import torch

import pipeloom as pl
from pipeloom.errors import InputError
from pipeloom.models.experts import take_over
from pipeloom.models.experts.transformers_experts import FusedExperts
from pipeloom.parallel.placed import placed_block

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "num_experts_per_tok": 2,
    "intermediate_size": 24,
}
MIXTURES = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 8},
    "DeepseekV3": {
        "n_routed_experts": 8,
        "moe_intermediate_size": 24,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
    "GptOss": {"num_local_experts": 4, "head_dim": 8},
}


def make(name: str):
    config = getattr(transformers, f"{name}Config")(**SIZES, **MIXTURES[name])
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("name", MIXTURES)
def test_outputs_and_gradients_are_those_of_the_original(name):
    original = make(name)
    taken = copy.deepcopy(original)
    found = take_over(taken)
    assert found == take_over(taken)
    assert len(found) == (1 if name == "DeepseekV3" else 2)
    assert all(isinstance(taken.get_submodule(each), FusedExperts) for each in found)
    assert taken.state_dict().keys() == original.state_dict().keys()
    tokens = torch.randint(0, 32, (3, 8))
    for model in (original, taken):
        model(input_ids=tokens, labels=tokens).loss.backward()
    for (key, a), b in zip(original.named_parameters(), taken.parameters(), strict=True):
        expected = torch.zeros_like(a) if a.grad is None else a.grad
        torch.testing.assert_close(b.grad, expected, rtol=1e-9, atol=1e-12, msg=key)
    twin = copy.deepcopy(taken)
    torch.testing.assert_close(twin(tokens).logits, original(tokens).logits, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["Mixtral", "DeepseekV3", "GptOss"])
def test_expert_parallel_processes_share_experts(name):
    """Outputs of every process, and the sum of its parts of the gradients, beside one process."""
    original, tokens = make(name), torch.randint(0, 32, (2, 2, 8), generator=torch.Generator().manual_seed(1))
    take_over(original)
    outputs = [original(each).logits for each in tokens]
    sum(output.square().sum() for output in outputs).backward()

    def work():
        with pl.Mesh(dp=2, ep=2) as mesh:
            model = pl.parallelize(copy.deepcopy(original), mesh)
            model.zero_grad()
            output = model(tokens[mesh.coordinate("dp")]).logits
            output.square().sum().backward()
            torch.testing.assert_close(output, outputs[mesh.coordinate("dp")], rtol=1e-10, atol=1e-12)
            found = {}
            for key, parameter in model.named_parameters():
                block = placed_block(parameter)
                found[key] = torch.zeros(parameter.shape if block is None else block.full_shape, dtype=torch.float64)
                if block is not None:
                    block.how.join(parameter.grad, block.place, found[key])
                elif parameter.grad is not None:
                    found[key] += parameter.grad
            assert any(placed_block(parameter) for parameter in model.parameters())
            return found

    first, second = pl.run_threads(2, work, timeout_seconds=60)
    for key, parameter in original.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(first[key] + second[key], parameter.grad, rtol=1e-9, atol=1e-11, msg=key)


def test_experts_with_biases_are_not_cut_along_tp():
    models = [make("GptOss") for _ in range(2)]

    def work():
        with pl.Mesh(tp=2) as mesh:
            model = models.pop()
            with pytest.raises(InputError, match=r"experts.gate_up_proj.*with biases, .* cannot be cut along tp"):
                pl.parallelize(model, mesh, {"model.layers.*.mlp.experts": "experts"})
            assert not isinstance(model.model.layers[0].mlp.experts, FusedExperts)

    pl.run_threads(2, work, timeout_seconds=60)


def test_routers_declare_losses_and_loads_and_move_their_bias():
    model = make("DeepseekV3")
    take_over(model, balance_weight=0.5, z_loss_weight=0.25)
    tokens = torch.randint(0, 32, (3, 8))
    with pl.auxiliary_losses() as found:
        model(tokens)
    router = model.model.layers[1].mlp.gate
    assert [(loss.module, loss.name, loss.weight) for loss in found.losses] == [
        (router, "balance", 0.5),
        (router, "z", 0.25),
    ]
    observed = {quantity.name: quantity.values for quantity in found.observed}
    assert observed["chosen"].sum() == 2 * observed["tokens"] == 48
    before = router.e_score_correction_bias.clone()
    router.after_step(observed)
    moved = (router.e_score_correction_bias - before) / 0.001
    torch.testing.assert_close(moved, (6.0 - observed["chosen"]).sign().to(moved.dtype), rtol=1e-6, atol=1e-6)


def test_models_without_fused_experts_are_refused():
    with pytest.raises(InputError, match=r"^Linear has no experts with fused weights"):
        take_over(torch.nn.Linear(2, 2))


def test_losses_without_a_router_that_declares_them_are_refused():
    model = make("Mixtral")
    for layer in model.model.layers:
        layer.mlp.gate = torch.nn.Identity()
    assert take_over(model)
    with pytest.raises(InputError, match=r"^balance_weight=0.1.*'model.layers.0.mlp.experts' have no router"):
        take_over(model, balance_weight=0.1)


def test_a_bias_keeps_32_bits_in_a_model_of_16():
    model = make("DeepseekV3")
    take_over(model)
    router = model.bfloat16().model.layers[1].mlp.gate
    assert router.weight.dtype == torch.bfloat16
    with torch.no_grad():
        router.e_score_correction_bias.fill_(0.75)
    for _ in range(10):
        router.after_step({"chosen": torch.arange(8)})
    assert router.e_score_correction_bias[0] == pytest.approx(0.76)
    router.after_step({})  # before the layer has run


class PlainExperts(torch.nn.Module):
    """Experts of another form than the usual ones: no gate."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.up_proj = torch.nn.Parameter(torch.randn(4, 8, 6) * 0.3)
        self.down_proj = torch.nn.Parameter(torch.randn(4, 6, 8) * 0.3)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique():
            token, choice = torch.where(top_k_index == expert)
            inside = torch.relu(hidden_states[token] @ self.up_proj[expert].T)
            out = out.index_add(0, token, inside @ self.down_proj[expert].T * top_k_weights[token, choice, None])
        return out


class ChosenByInput(torch.nn.Module):
    """The last feature of a token is its expert."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.experts = torch.nn.Linear(6, 6), PlainExperts()

    def forward(self, x):
        expert = x[..., 6].reshape(-1, 1).long()
        hidden = self.first(x[..., :6])
        return self.experts(hidden.reshape(-1, 6), expert, torch.ones_like(expert, dtype=x.dtype)).view_as(hidden)


def test_replicas_whose_experts_no_token_chose_shard_their_zero_gradients():
    """Replicas 0 and 1 share experts and choose those of replica 0 alone; 2 and 3 choose all."""
    torch.manual_seed(0)
    base = ChosenByInput().double()
    x = torch.randn(4, 4, 7, dtype=torch.float64)
    x[:2, :, 6], x[2:, :, 6] = torch.tensor([0.0, 1, 0, 1]), torch.tensor([0.0, 1, 2, 3])
    loss = torch.nn.functional.mse_loss(base(x.flatten(0, 1)), x.flatten(0, 1)[:, :6])
    loss.backward()

    def work():
        with pl.Mesh(dp=4, ep=2) as mesh:
            model = pl.parallelize(copy.deepcopy(base), mesh)
            made = pl.schedules.one_f_one_b(num_ranks=1, num_microbatches=1)
            options = {"loss_fn": torch.nn.functional.mse_loss, "mesh": mesh, "data": pl.DataParallel("zero1")}
            with pl.Pipeline(torch.nn.Sequential(model), made, **options) as pipe:
                own = x[mesh.coordinate("dp")]
                found = pipe.step(own, own[:, :6])
                gradients = dict(pipe.named_parameters())
                return found, {name: p.grad for name, p in gradients.items() if p.grad is not None}

    for found, gradients in pl.run_threads(4, work, timeout_seconds=30):
        torch.testing.assert_close(found, loss.detach(), rtol=1e-12, atol=0)
        assert gradients
