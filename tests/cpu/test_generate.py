"""`Pipeline.generate` gives the tokens of the model's own generation."""

from __future__ import annotations

import copy
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.errors import InputError, PipeloomError
from pipeloom.models import GPT, GPTConfig, init_parameters
from tests.cpu.ranks import run_ranks
from tests.cpu.reference import make_gpt

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SLIDING = {"sliding_window": 6}
MIXTURE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {},
    "gpt2": {"num_hidden_layers": 6},
    "mistral": SLIDING,
    "gemma2": SLIDING,
    "gemma3_text": SLIDING | {"sliding_window_pattern": 2},
    "phi3": {"num_hidden_layers": 6},
    "mixtral": MIXTURE,
    "gemma3n_text": {
        "vocab_size_per_layer_input": 97,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "qwen3_moe": MIXTURE,
    # Other states than keys and values are not kept, so whole sequences run for every token.
    "mamba2": {"num_heads": 8, "n_groups": 2, "chunk_size": 4, "state_size": 8},
    "falcon_mamba": {"state_size": 8},
    "qwen3_next": MIXTURE
    | {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
}
ALIKE = ("qwen3", "phi3", "qwen3_moe", "qwen3_next", "falcon_mamba")  # in whole grids: others have their caches
SLOW = ("gemma3n_text", "mamba2", "qwen3_next")  # others are sampled, and end early
SCHEDULES = [("1f1b", 2, 4), ("gpipe", 3, 2), ("zb-v", 2, 3), ("interleaved", 3, 3)]


@cache
def _model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SIZES | FAMILIES[kind])
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def _prompts(samples: int = 5, *, padded: bool = True) -> dict[str, Tensor]:
    ids = torch.randint(3, 97, (samples, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :3] = mask[-1, :1] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def _ending(model: Any) -> int:
    """A token that ends the first sequence early, and no other at once."""
    return int(model.generate(**_prompts(), max_new_tokens=4, do_sample=False)[0, 9])


GREEDY = {"do_sample": False, "max_new_tokens": 5}
SAMPLED = {
    "do_sample": True,
    "temperature": 0.8,
    "top_k": 20,
    "top_p": 0.95,
    "repetition_penalty": 1.2,
    "max_new_tokens": 4,
}


def _expected(model: Any, prompts: dict[str, Tensor], **settings: Any) -> Tensor:
    torch.manual_seed(5)
    found: Tensor = model.generate(**prompts, **settings)
    return found


@pytest.mark.parametrize(
    "kind", [pytest.param(each, marks=pytest.mark.whole_grid if each in ALIKE else ()) for each in FAMILIES]
)
def test_tokens_are_those_of_the_models_own_generate(kind: str) -> None:
    name, num_ranks, count = SCHEDULES[list(FAMILIES).index(kind) % len(SCHEDULES)]
    schedule = pl.schedules.build(name, num_ranks=num_ranks, num_microbatches=count)
    model, prompts = _model(kind), _prompts(padded=kind != "gemma2")
    with pl.Pipeline(copy.deepcopy(model), schedule, transport="loopback") as pipe:
        others: dict[str, Any] = {"cache_implementation": "static"} if kind in ("llama", "gemma3_text") else {}
        each = (GREEDY | others, GREEDY | {"eos_token_id": _ending(model)}, SAMPLED)
        if kind == "qwen2":  # how many tokens, in the ways of transformers
            limits = ({}, {"max_length": 12}, {"generation_config": transformers.GenerationConfig(max_new_tokens=3)})
            each += tuple({"do_sample": False, "pad_token_id": 0, **limit} for limit in limits)
        if kind in SLOW:
            each = (SAMPLED | {"max_new_tokens": 3},)
        for settings in each:
            found = pipe.generate(prompts, seed=5, **settings)
            assert torch.equal(found, _expected(model, prompts, **settings)), settings


# Processes, replicas, tensor parallelism


def _in_processes(rank: int, name: str, transport: str, num_ranks: int) -> list[list[int]]:
    schedule = pl.schedules.build(name, num_ranks=num_ranks, num_microbatches=4)
    prompts = _prompts() if rank == 0 else None
    with pl.Pipeline(copy.deepcopy(_model("llama")), schedule, transport=transport) as pipe:
        with pytest.raises(InputError, match="input_ids is"):
            pipe.generate(torch.ones(3), max_new_tokens=2)
        with pytest.raises(InputError, match=r"different arguments.*max_new_tokens=[234]"):
            pipe.generate(prompts, max_new_tokens=2 + rank)
        found = [pipe.generate(prompts, seed=5, **settings).tolist() for settings in (GREEDY, SAMPLED)]
        assert found[0] == pipe.generate(prompts, seed=5, **GREEDY).tolist()
        ids = _prompts()["input_ids"]
        labelled = {"input_ids": ids, "labels": ids}
        other = partial(pipe.forward, ids) if transport == "torch" else partial(pipe.step, labelled)
        with pytest.raises(PipeloomError, match=r"all ranks must make the same calls|ended|cannot be reached"):
            other() if rank else pipe.generate(prompts, max_new_tokens=2)
    return found


@pytest.mark.parametrize(("name", "transport", "num_ranks"), [("1f1b", "shared-memory", 3), ("zb-v", "torch", 2)])
def test_every_process_gets_the_tokens(name: str, transport: str, num_ranks: int) -> None:
    expected = [_expected(_model("llama"), _prompts(), **settings).tolist() for settings in (GREEDY, SAMPLED)]
    assert run_ranks(_in_processes, num_ranks, name, transport, num_ranks) == [expected] * num_ranks


@pytest.mark.parametrize(("axes", "data"), [({"dp": 2}, "ddp"), ({"dp": 2}, "zero3"), ({"tp": 2}, "zero1")])
def test_replicas_and_tensor_parallel_ranks_generate(axes: dict[str, int], data: str) -> None:
    model, ending = _model("llama"), _ending(_model("llama"))
    few = {"max_new_tokens": 2 if data == "zero3" else 5}  # replicas meet in every forward

    def run() -> tuple[int, Tensor, Tensor]:
        mesh = pl.Mesh(pp=2, **axes)
        own = copy.deepcopy(model)
        if mesh.degree("tp") > 1:
            own = pl.parallelize(own, mesh)
        replica = mesh.coordinate("dp")
        schedule = pl.schedules.build("1f1b", num_ranks=2, num_microbatches=4)
        with pl.Pipeline(own, schedule, mesh=mesh, data=data) as pipe:
            prompts = _prompts(5 - 2 * replica)  # replicas of different sizes
            if "tp" in axes:
                with pytest.raises(InputError, match=r"different arguments.*generator"):
                    pipe.generate(prompts, seed=5 if mesh.coordinate("tp") else None, **SAMPLED | few)
            greedy = pipe.generate(prompts, eos_token_id=ending, **GREEDY | few)
            return replica, greedy, pipe.generate(prompts, seed=5, **SAMPLED | few)

    for replica, greedy, sampled in pl.run_threads(4, run):
        prompts = _prompts(5 - 2 * replica)
        expected = _expected(model, prompts, eos_token_id=ending, **GREEDY | few)
        assert torch.equal(greedy[:, : expected.shape[1]], expected)
        assert (greedy[:, expected.shape[1] :] == 0).all()
        assert torch.equal(sampled, _expected(model, prompts, **SAMPLED | few))


# Other models


@torch.no_grad()
def _continued(model: nn.Module, ids: Tensor, count: int, window: int) -> Tensor:
    for _ in range(count):
        ids = torch.cat([ids, model(ids[:, -window:])[:, -1].argmax(-1)[:, None]], 1)
    return ids


class _Doubled(nn.Module):
    """A layer of which pipeloom does not know whether tokens are independent."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.cumsum(1) / 7


@pytest.mark.parametrize(
    ("name", "num_ranks", "positions"),
    [
        ("1f1b", 2, "rotary"),
        ("zb-v", 2, "learned"),
        ("chimera", 4, "rotary"),
        pytest.param("1f1b", 2, "learned", marks=pytest.mark.whole_grid),
        pytest.param("zb-v", 2, "rotary", marks=pytest.mark.whole_grid),
        pytest.param("chimera", 4, "learned", marks=pytest.mark.whole_grid),
    ],
)
def test_models_that_map_tokens_to_logits(name: str, num_ranks: int, positions: str) -> None:
    config = GPTConfig(vocabulary_size=32, layers=8, width=16, heads=2, sequence_length=12, positions=positions)
    model = GPT(config).double()
    init_parameters(model, seed=5)
    window = model.config.sequence_length
    ids = torch.randint(model.config.vocabulary_size, (3, 4), generator=torch.Generator().manual_seed(0))
    schedule = pl.schedules.build(name, num_ranks=num_ranks, num_microbatches=4)
    with torch.no_grad(), pl.Pipeline(copy.deepcopy(model), schedule, transport="loopback") as pipe:
        assert pipe.state.keeps_slices
        for count in (1, window - 4, window + 2):  # beyond the window, whole sequences run for every token
            assert torch.equal(pipe.generate(ids, max_new_tokens=count), _continued(model, ids, count, window))
        drawn = [pipe.generate(ids, max_new_tokens=4, do_sample=True, top_k=5, top_p=0.9, seed=s) for s in (1, 1, 2)]
        assert torch.equal(drawn[0], drawn[1])
        assert not torch.equal(drawn[0], drawn[2])
        ended = pipe.generate(ids, max_new_tokens=6, eos_token_id=int(drawn[0][0, 4]), do_sample=True, top_k=5, seed=1)
        assert ended.shape[1] <= 10
        assert torch.equal(pipe.generate(ids, max_length=6), _continued(model, ids, 2, window))
        with pytest.raises(InputError, match="max_length=4: must be longer than the prompts"):
            pipe.generate(ids, max_length=4)


def test_layers_that_attend_in_their_own_way_run_whole_sequences() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), _Doubled(), nn.Linear(8, 11)).double()
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    with torch.no_grad(), pl.Pipeline(model, pl.schedules.gpipe(num_ranks=2, num_microbatches=2)) as pipe:
        assert not pipe.state.keeps_slices
        assert torch.equal(pipe.generate(ids, max_new_tokens=5), _continued(model, ids, 5, 99))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0: must be an integer"),
        ({"max_new_tokens": None, "max_length": 7}, "max_length"),
        ({"temperature": 0.0}, "temperature=0.0: must be above 0"),
        ({"top_p": 1.5}, "top_p=1.5: must be above 0"),
        ({"num_beams": 3}, "num_beams=3: generate of a pipeline"),
        ({"no_such_setting": 3}, "no_such_setting"),
        ({"streamer": print}, "'streamer', which pipelines do not support"),
        ({"attention_mask": torch.ones(2, 2)}, r"attention_mask is \[2, 2\]: must have the shape \[5, 7\]"),
        ({"input_ids": torch.ones(2, 0, dtype=torch.long)}, "must be an integer tensor"),
        (
            {"input_ids": torch.tensor([[1, 2], [3, 4096]])},
            "input_ids has 4096: token ids of LlamaForCausalLM are from 0",
        ),
        ({"input_ids": torch.tensor([[1, -100]])}, "input_ids has -100: token ids"),
        ({"input_ids": None}, "inputs=None: the rank with the first stage"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(settings: dict[str, Any], message: str) -> None:
    schedule = pl.schedules.gpipe(num_ranks=2, num_microbatches=2)
    with pl.Pipeline(_model("llama"), schedule, transport="loopback") as pipe:
        with pytest.raises(InputError, match=message) as error:
            pipe.generate(**{"input_ids": _prompts()["input_ids"], "max_new_tokens": 2, **settings})
        assert "\n" not in str(error.value)
        assert pipe.generate(_prompts(), max_new_tokens=1).shape == (5, 8)


def test_plain_models_refuse_masks_and_settings_of_others() -> None:
    ids = torch.ones(2, 4, dtype=torch.long)
    with pl.Pipeline(make_gpt(), pl.schedules.gpipe(num_ranks=2, num_microbatches=2)) as pipe:
        for settings in ({"attention_mask": torch.tensor([[0, 1, 1, 1]] * 2)}, {"repetition_penalty": 1.5}):
            with pytest.raises(InputError):
                pipe.generate(ids, max_new_tokens=2, **settings)


@pytest.mark.parametrize("kind", ["slices", "cp", "sequence", pytest.param("2d", marks=pytest.mark.whole_grid)])
def test_stages_that_share_out_tokens_or_samples_run_whole_sequences(kind: str) -> None:
    model = make_gpt(dtype=torch.float64)
    axes = {"slices": {}, "cp": {"cp": 2}, "sequence": {"tp": 2}, "2d": {"tp": 4}}[kind]
    ids = torch.randint(32, (2, 3), generator=torch.Generator().manual_seed(0))
    expected = _continued(model, ids, 4, 12)

    def run() -> Tensor:
        mesh, own = pl.Mesh(pp=2, **axes), copy.deepcopy(model)
        if "tp" in axes:
            own = pl.parallelize(own, mesh, sequence=kind == "sequence", layout="2d" if kind == "2d" else "1d")
        schedule = pl.schedules.build("1f1b", num_ranks=2, num_microbatches=1)
        if kind == "slices":
            schedule = pl.schedules.build("terapipe", num_ranks=2, num_microbatches=1, num_slices=2)
        with pl.Pipeline(own, schedule, mesh=mesh) as pipe:
            return pipe.generate(ids, max_new_tokens=4, pad_to_multiple_of=4)

    for found in pl.run_threads(2 * max([1, *axes.values()]), run):
        assert torch.equal(found, expected)
