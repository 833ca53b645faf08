"""Plans and sizes that tensor-parallel ranks cannot share are refused in one line."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import pipeloom as pl
from pipeloom.errors import InputError
from pipeloom.models import GPT
from tests.cpu.tensor_cases import batch, build, config, drawn, on_mesh


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"blocks.*.qkw": "column"}, r"'blocks\.\*\.qkw': no module has this name\. Did you mean 'blocks\.\*\.qkv'"),
        ({"blocks.*.qkv": "colum"}, r"'colum': a kind is one of column, column_gather, row"),
        ({"blocks.*.qkv": "moe_other_experts"}, r"'moe_other_experts': a kind is one of"),
        ({"blocks.*.attention_norm": "column"}, r"LayerNorm is no layer that can be cut this way"),
        ({"embedding": "row"}, r"'embedding': 'row': Embedding is no layer"),
        ({"blocks.*.qkv": ("column", ((16, 4), (16, 4)))}, r"have 32 elements, the layer 48"),
        ({"blocks.*.qkv": ("column", (16, 4))}, r"sections \(16, 4\) must be pairs"),
        ({"blocks.*.qkv": ("column", ((48, 6),))}, r"'blocks\.0\.qkv' has 6 heads, .*Use tp=2 or tp=3"),
        ({}, r"plan=\{\}: must map module names"),
    ],
)
def test_plans_that_do_not_fit_are_refused_in_one_line(plan, said):
    def work(mesh):
        with pytest.raises(InputError, match=said) as error:
            pl.parallelize(GPT(config()), mesh, plan)
        assert "\n" not in str(error.value)

    on_mesh(work, tp=4)


def test_sizes_that_do_not_fit_are_refused_in_one_line():
    def refused(said, *arguments, **settings):
        with pytest.raises(InputError, match=said) as error:
            pl.parallelize(*arguments, **settings)
        assert "\n" not in str(error.value)

    def work(mesh):
        refused(r"has 3 heads, which 4 tensor-parallel ranks cannot share evenly. Use tp=1 or tp=3", _gpt(3), mesh)
        refused(r"has 6 heads", _gpt(6), mesh)
        refused(r"has 3 key heads", _gpt(12, kv_heads=3), mesh)
        refused(r"has 6 features", nn.Sequential(nn.Linear(4, 6)), mesh, {"0": "column"})
        refused(r"has no plan of its own", nn.Sequential(nn.Linear(4, 4)), mesh)
        refused(r"sequence=True: no embedding", nn.Sequential(nn.Linear(4, 4)), mesh, {"0": "column"}, sequence=True)
        refused(r"layout='4d': must be one of 1d", GPT(config()), mesh, layout="4d")
        refused(r"model is a list", [nn.Linear(4, 4)], mesh, {"0": "column"})
        refused(r"mesh=2: must be a pipeloom.Mesh", GPT(config()), 2)
        refused(r"module 'head' \(Linear\) is not in the plan", _tied(), mesh, {"embedding": "vocabulary"})
        refused(
            r"tied to one that the plan cuts in another way", _tied(), mesh, {"embedding": "vocabulary", "head": "row"}
        )
        refused(r"is cut already", pl.parallelize(drawn(GPT(config())), mesh), mesh)
        model = pl.parallelize(build(config()), mesh, sequence=True)
        with pytest.raises(InputError, match=r"11 tokens .* must be a multiple of 4. Use 8 or 12 tokens"):
            model(batch()[0][:, :11])
        with pytest.raises(IndexError, match="from 0 to 29"):
            model(torch.full((1, 12), 30))

    on_mesh(work, tp=4)


def _gpt(heads, **sizes):
    return GPT(config(width=24, heads=heads, **sizes))


def _tied():
    return GPT(config(tie_embeddings=True))


def test_one_rank_leaves_the_model_as_it_is():
    def work(mesh):
        model = GPT(config())
        before = list(model.modules())
        assert pl.parallelize(model, mesh, sequence=True) is model
        assert all(one is other for one, other in zip(before, model.modules(), strict=True))
        with pytest.raises(InputError, match="no module has this name"):
            pl.parallelize(model, mesh, {"nothing": "column"})

    on_mesh(work, tp=1)


def test_adapters_around_a_model_are_refused():
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=16, num_hidden_layers=1, **sizes)
    whole = peft.get_peft_model(transformers.LlamaForCausalLM(config), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(
        InputError, match="own plan names no module of PeftModel; adapters, for example, rename modules"
    ):
        pl.run_threads(2, lambda: pl.parallelize(copy.deepcopy(whole), pl.Mesh(tp=2)))
