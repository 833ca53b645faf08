"""Models of Hugging Face directories: each process of a pipeline reads its own stages, with transformers' values."""

from __future__ import annotations

import json
import warnings

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (the extra 'huggingface')")

import transformers
from safetensors.torch import load_file, save_file

import pipeloom as pl
from pipeloom.errors import CheckpointError, InputError
from pipeloom.pretrained import load_weights
from tests.cpu.huggingface_families import PARTS, VOCABULARY, compared, small_model

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

SIZES = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 64}
LLAMA = {**SIZES, "num_key_value_heads": 2}


def config(kind, **changes):
    if kind == "gpt2":
        return transformers.GPT2Config(n_embd=32, n_layer=4, n_head=4, vocab_size=64, n_positions=64, **changes)
    sizes = SIZES if kind == "bert" else LLAMA
    return transformers.CONFIG_MAPPING[kind](**{**sizes, **changes})


@pytest.fixture
def saved(tmp_path):
    """Saves a model of random values; returns its directory."""

    def save(model_class, configuration, *, shard="50KB", edit=None):
        torch.manual_seed(0)
        model_class(configuration).save_pretrained(tmp_path, max_shard_size=shard)
        if edit is not None:
            file = tmp_path / "model.safetensors"
            save_file(edit(load_file(file)), file, {"format": "pt"})
        return tmp_path

    return save


def tensors(model):
    """All parameters and buffers by all names."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: tensor.detach() for name, tensor in named}


def assert_equal(mine, theirs, *, but=()):
    assert mine.keys() == theirs.keys()
    different = [
        name for name in theirs if mine[name].dtype != theirs[name].dtype or not torch.equal(mine[name], theirs[name])
    ]
    assert set(different) <= set(but), different


@pytest.mark.parametrize(
    ("name", "configuration", "schedule"),
    [
        ("LlamaForCausalLM", config("llama"), "1f1b"),
        ("LlamaForCausalLM", config("llama", tie_word_embeddings=True), "zb-v"),
        ("GPT2LMHeadModel", config("gpt2"), "interleaved"),
        ("MixtralForCausalLM", config("mixtral", num_local_experts=4), "1f1b"),  # experts are fused on loading
    ],
)
def test_a_pipeline_reads_what_transformers_reads(saved, name, configuration, schedule):
    home = saved(getattr(transformers, name), configuration)
    theirs = getattr(transformers, name).from_pretrained(home)
    model = pl.from_pretrained(home)
    assert type(model) is type(theirs)
    assert all(tensor.is_meta for tensor in tensors(model).values())
    ids = torch.randint(0, VOCABULARY, (4, 7))
    with pl.Pipeline(model, pl.schedules.build(schedule, num_ranks=2, num_microbatches=4)) as pipe, torch.no_grad():
        assert_equal(pipe.state_dict(), theirs.state_dict())
        torch.testing.assert_close(pipe.forward(ids).logits, theirs(ids).logits, rtol=0, atol=1e-6)
        own, wanted = tensors(model), tensors(theirs)
        assert all(torch.equal(own[name], wanted[name]) for name in own if not own[name].is_meta)


def test_stages_that_are_cut_before_and_other_ways_in(saved):
    """`split`, stages that call a decoder's modules for slices, and the model as a whole."""
    home = saved(transformers.LlamaForCausalLM, config("llama"))
    theirs = transformers.LlamaForCausalLM.from_pretrained(home)
    ids = torch.randint(0, VOCABULARY, (4, 8))
    stages = pl.split.split(pl.from_pretrained(home), 2, cut=[1, 3])
    sliced = pl.schedules.build("seq1f1b", num_ranks=2, num_microbatches=2, num_slices=2)
    plain = pl.schedules.build("1f1b", num_ranks=2, num_microbatches=2)
    for model, schedule in ((stages, plain), (pl.from_pretrained(home), sliced)):
        with pl.Pipeline(model, schedule) as pipe, torch.no_grad():
            torch.testing.assert_close(pipe.forward(ids).logits, theirs(ids).logits, rtol=0, atol=1e-6)
    assert_equal(tensors(load_weights(pl.from_pretrained(home))), tensors(theirs))


def test_an_optimizer_that_was_made_before_the_pipeline_trains_it(saved):
    """Parameters stay the same objects, with their hooks, when they get their values."""
    model, ids = (
        pl.from_pretrained(saved(transformers.LlamaForCausalLM, config("llama"))).train(),
        torch.ones(4, 7).long(),
    )
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), []
    model.lm_head.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.shape))
    with pl.Pipeline(model, pl.schedules.build("1f1b", num_ranks=2, num_microbatches=2)) as pipe:
        assert set(pipe.parameters()) == set(model.parameters())
        losses = []
        for _ in range(2):
            losses.append(float(pipe.step({"input_ids": ids, "labels": ids})))
            optimizer.step()
    assert losses[1] < losses[0]
    assert seen == [model.lm_head.weight.shape] * 4


@pytest.mark.whole_grid
@pytest.mark.parametrize("part", range(PARTS))
def test_every_family(tmp_path, part):
    for kind in compared(part):
        if kind != "youtu":  # whose loading in transformers sets a row of the table to 0
            model = small_model(kind).float()
            model.save_pretrained(tmp_path / kind, max_shard_size="100KB")
            theirs = type(model).from_pretrained(tmp_path / kind)
            assert_equal(tensors(load_weights(pl.from_pretrained(tmp_path / kind, type(model)))), tensors(theirs))


def without_prefix(state):
    return {name.removeprefix("transformer."): value for name, value in state.items()}


def old_norms(state):
    return {name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): state[name] for name in state}


@pytest.mark.parametrize(
    ("kind", "written", "read", "edit", "missing"),
    [
        ("llama", "LlamaModel", "LlamaForCausalLM", None, {"lm_head.weight"}),
        ("llama", "LlamaForCausalLM", "LlamaModel", None, set()),
        ("llama", "LlamaForCausalLM", "AutoModelForSequenceClassification", None, {"score.weight"}),
        ("bert", "BertForMaskedLM", "BertForMaskedLM", old_norms, set()),
        ("gpt2", "GPT2LMHeadModel", "GPT2LMHeadModel", without_prefix, set()),
        ("mixtral", "MixtralModel", "MixtralForCausalLM", None, {"lm_head.weight"}),
    ],
)
def test_names_are_changed_as_transformers_changes_them(saved, kind, written, read, edit, missing):
    home = saved(getattr(transformers, written), config(kind), shard="1GB", edit=edit)
    theirs = getattr(transformers, read).from_pretrained(home)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model = pl.from_pretrained(home, getattr(transformers, read))
    messages = [str(each.message) for each in told if str(home) in str(each.message)]
    assert sum("has no values for" in message for message in messages) == bool(missing)
    assert_equal(tensors(load_weights(model)), tensors(theirs), but=missing)


def test_a_new_head_is_the_same_on_every_rank_and_drawn_as_the_model_draws(saved):
    home = saved(transformers.BertForMaskedLM, config("bert"), shard="1GB")
    heads = []
    for num_ranks, seed in ((1, 0), (3, 0), (3, 1)):
        torch.manual_seed(num_ranks)
        with pytest.warns(UserWarning, match=r"no values for .*classifier\.weight.* are initialized"):
            model = pl.from_pretrained(home, transformers.BertForSequenceClassification, num_labels=500, seed=seed)
        expected = torch.random.get_rng_state()
        heads.append(load_weights(model).classifier)
        assert torch.equal(torch.random.get_rng_state(), expected)
    assert torch.equal(heads[0].weight, heads[1].weight)
    assert not torch.equal(heads[1].weight, heads[2].weight)
    assert heads[0].weight.shape == (500, 32)
    assert 0.019 < heads[0].weight.std() < 0.021
    assert not heads[0].bias.any()


def test_ties_follow_the_files(saved):
    def both(state):
        return {**state, "lm_head.weight": state["model.embed_tokens.weight"].clone()}

    def different(state):
        return {**state, "lm_head.weight": state["model.embed_tokens.weight"] + 1}

    def other(state):
        return {name.replace("model.embed_tokens", "lm_head"): value for name, value in state.items()}

    tied = config("llama", tie_word_embeddings=True)
    for edit in (both, other):
        home = saved(transformers.LlamaForCausalLM, tied, shard="1GB", edit=edit)
        theirs, mine = transformers.LlamaForCausalLM.from_pretrained(home), load_weights(pl.from_pretrained(home))
        assert mine.lm_head.weight is mine.model.embed_tokens.weight
        assert_equal(tensors(mine), tensors(theirs))
    home = saved(transformers.LlamaForCausalLM, tied, shard="1GB", edit=different)
    with pytest.warns(UserWarning, match="have different values in the files"):
        mine = load_weights(pl.from_pretrained(home))
    assert_equal(tensors(mine), tensors(transformers.LlamaForCausalLM.from_pretrained(home)))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, "float16"])
def test_dtypes(saved, dtype):
    home = saved(transformers.LlamaForCausalLM, config("llama"))
    written = json.loads((home / "config.json").read_text())
    (home / "config.json").write_text(json.dumps({**written, "dtype": "bfloat16"}))
    theirs = transformers.LlamaForCausalLM.from_pretrained(home, dtype=dtype or "auto")
    assert_equal(tensors(load_weights(pl.from_pretrained(home, dtype=dtype))), tensors(theirs))


def refusals(home):
    """What is wrong with a directory or a call -> the call, the error and its words."""
    read = pl.from_pretrained

    def cut(path):
        path.write_bytes(path.read_bytes()[:-4])
        return read(home)

    def hidden(path, name):
        path.rename(home / name)
        return read(home)

    def emptied(path):
        path.write_bytes(b"")
        return read(home)

    def unnamed(path):
        written = path.read_text()
        path.write_text(
            json.dumps({key: value for key, value in json.loads(written).items() if key != "architectures"})
        )
        try:
            return read(home)
        finally:
            path.write_text(written)

    first = sorted(home.glob("*.safetensors"))[0]
    index = home / "model.safetensors.index.json"
    yield lambda: read(home / "nowhere"), InputError, r"nowhere is not a directory.*download=True"
    yield lambda: read(None), InputError, r"directory is None\. Pass the path"
    yield lambda: read(home, device="gpu"), InputError, r"device: 'gpu' is no device"
    yield lambda: read(home, device="cuda:99"), InputError, r"device: 'cuda:99' does not exist"
    yield lambda: read(home, colour="red"), InputError, r"'colour' is no option of LlamaConfig"
    yield lambda: read(home, torch.nn.Linear), InputError, r"must be a class of transformers' models"
    yield lambda: read(home, transformers.AutoModelForImageClassification), InputError, r"has no model for LlamaConfig"
    yield lambda: read(home, dtype="int8"), InputError, r"dtype='int8': must be a floating-point type"
    yield lambda: read(home, hidden_size=64), CheckpointError, r"has shape \[64, 32\] in .* and \[64, 64\] in Llama"
    yield lambda: read(home, transformers.BertForMaskedLM), InputError, r"has no values for BertForMaskedLM, but"
    yield lambda: unnamed(home / "config.json"), InputError, r"names no model \(architectures\)"
    yield lambda: cut(first), CheckpointError, r"its end is missing"
    yield lambda: emptied(first), CheckpointError, r"is empty: it is damaged"
    yield lambda: hidden(first, "pytorch_model.bin"), CheckpointError, r"cannot be read"
    yield lambda: hidden(index, "nothing.json"), InputError, r"only unpickling reads.*save_pretrained"
    yield lambda: hidden(home / "config.json", "manifest.json"), InputError, r"pipeloom checkpoint convert"


def test_what_is_refused_in_one_line(saved):
    home = saved(transformers.LlamaForCausalLM, config("llama"))
    for call, error, words in refusals(home):
        with pytest.raises(error, match=words) as raised:
            call()
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.float32])
def test_a_buffer_that_the_model_does_not_initialize_has_no_value(saved, dtype):
    class Buffers(transformers.LlamaForCausalLM):
        def __init__(self, configuration):
            super().__init__(configuration)
            for name, value in (("empty", 0), ("full", 1)):
                self.register_buffer(name, torch.full((3,), value, dtype=dtype), persistent=False)

    class Initializes(Buffers):
        def _init_weights(self, module):
            super()._init_weights(module)
            if module is self:
                self.empty.fill_(0)
                self.full.fill_(1)

    home = saved(transformers.LlamaForCausalLM, config("llama"))
    with pytest.raises(InputError, match=r"^'(empty|full)' is in no file, and Buffers gives it no value"):
        load_weights(pl.from_pretrained(home, Buffers))
    loaded = load_weights(pl.from_pretrained(home, Initializes))
    assert not loaded.empty.any()
    assert torch.equal(loaded.full, torch.ones(3, dtype=dtype))


def test_a_module_added_on_the_meta_device_has_no_values(saved):
    model = pl.from_pretrained(saved(transformers.LlamaForCausalLM, config("llama")))
    model.extra = torch.nn.Linear(2, 2, device="meta")
    with pytest.raises(InputError, match=r"'extra\.bias|weight' has no value: it is on the meta device"):
        load_weights(model)
    model.extra = torch.nn.Linear(2, 2)
    load_weights(model)
    model.config.num_labels = 3
    with pytest.raises(InputError, match="without weights to load"):
        load_weights(torch.nn.Linear(2, 2))


def test_an_expert_parallel_process_reads_its_own_experts(saved, monkeypatch):
    from pipeloom.models.experts import take_over
    from pipeloom.pretrained import weights

    home, read = saved(transformers.MixtralForCausalLM, config("mixtral", num_local_experts=4)), []
    real = weights.mapped

    def mapped(stored):
        read.append(stored)
        return real(stored)

    monkeypatch.setattr(weights, "mapped", mapped)

    def work():
        model = pl.from_pretrained(home)
        take_over(model)
        mesh = pl.Mesh(dp=2, ep=2)
        return tensors(load_weights(pl.parallelize(model, mesh)))

    found = pl.run_threads(2, work)
    theirs = tensors(transformers.MixtralForCausalLM.from_pretrained(home))
    for name, value in theirs.items():
        own = [each[name] for each in found]
        assert torch.equal(torch.cat(own) if "mlp.experts" in name else own[0], value), name
    experts = sum(stored.shape == (24, 32) or stored.shape == (32, 24) for stored in read)
    assert experts == 4 * 4 * 3  # layers, experts, and tensors per expert: each once in two processes
