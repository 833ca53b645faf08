"""Profiles of models that can be cut: what is measured is what the layers send and hold."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipeloom.cli import main
from pipeloom.errors import SplitError
from pipeloom.models import GPT, GPTConfig, init_parameters, loss_fn
from pipeloom.plan.partition import Profile, parse_profile, partition_layers
from pipeloom.split import profile_layers, profile_model


class Pair(nn.Module):
    """Sends two tensors on."""

    def forward(self, x):
        return x, x[:, :1].long()


class First(nn.Module):
    def forward(self, pair):
        return pair[0]


def test_a_sequential():
    model = nn.Sequential(nn.Linear(4, 8), Pair(), First(), nn.Linear(8, 3, bias=False))
    x, y = torch.randn(16, 4), torch.randint(0, 3, (16,))
    before = {name: p.clone() for name, p in model.state_dict().items()}
    profile = Profile.of(profile_model(model, (x, y), loss_fn=F.cross_entropy, num_rounds=1))
    assert [layer.name for layer in profile.layers] == ["0", "1", "2", "3"]
    assert [layer.activation_bytes for layer in profile.layers] == [16 * 32, 16 * (32 + 8), 16 * 32, 16 * 12]
    assert [layer.parameter_bytes for layer in profile.layers] == [4 * 40, 0, 0, 4 * 24]
    assert all(layer.forward_seconds > 0 for layer in profile.layers)
    assert profile.layers[0].backward_seconds > 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert parse_profile(profile.to_json()) == profile


def test_the_slow_layer_gets_the_replicas(monkeypatch):
    now = 0.0

    class Work(nn.Module):
        def __init__(self, seconds):
            super().__init__()
            self.weight = nn.Parameter(torch.eye(64))
            self.seconds = seconds

        def forward(self, x):
            nonlocal now
            now += self.seconds
            return x @ self.weight

    monkeypatch.setitem(profile_layers.__kwdefaults__, "timer", lambda: now)
    profile = Profile.of(profile_model([Work(1.0), Work(200.0), Work(1.0)], torch.randn(64, 64)))
    assert [layer.forward_seconds for layer in profile.layers] == [1.0, 200.0, 1.0]
    found = partition_layers(profile, [(8, 1e12)])
    slow = next(stage for stage in found.stages if stage.first <= 1 <= stage.last)
    assert slow.replicas >= 6


def test_layers_that_work_in_place():
    """On what a leaf would be in a stage of its own; the sample stays as it is."""
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Flatten())
    x = torch.randn(2, 3, 8, 8)
    before = x.clone()
    profile = Profile.of(profile_model(model, x, num_rounds=1))
    assert [layer.activation_bytes for layer in profile.layers] == [2 * 3 * 64 * 4] + [2 * 4 * 36 * 4] * 3
    assert torch.equal(x, before)


def test_a_block_model_and_its_loss():
    config = GPTConfig(layers=2, width=16, heads=2, sequence_length=12, vocabulary_size=50)  # head and embedding tied
    model = GPT(config)
    init_parameters(model, seed=0)
    tokens = torch.randint(50, (3, 12))
    profile = Profile.of(profile_model(model, (tokens, tokens), loss_fn=loss_fn, num_rounds=1))
    assert [layer.name for layer in profile.layers] == ["embedding", "blocks.0", "blocks.1", "norm", "head"]
    assert [layer.activation_bytes for layer in profile.layers] == [3 * 12 * 16 * 4] * 4 + [3 * 12 * 50 * 4]
    block = 16 * 16 * 12 + 2 * 16
    assert [layer.parameter_bytes for layer in profile.layers] == [4 * n for n in (50 * 16, block, block, 16, 50 * 16)]


def test_a_hugging_face_model():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
    )
    model = transformers.LlamaForCausalLM(config)
    profile = Profile.of(profile_model(model, torch.randint(40, (2, 8)), num_rounds=1))
    assert [layer.name for layer in profile.layers] == [
        "model.embed_tokens",
        "model.layers.0",
        "model.layers.1",
        "model.norm",
        "lm_head",
    ]
    assert sum(layer.parameter_bytes for layer in profile.layers) == 4 * sum(p.numel() for p in model.parameters())
    assert profile.layers[1].activation_bytes == 2 * 8 * 16 * 4


def test_what_cannot_be_cut_is_refused():
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)

    with pytest.raises(SplitError, match="names no layers"):
        profile_model(Whole(), torch.zeros(1, 2))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(SplitError, match="meta device"):
        profile_model(model, torch.zeros(1, 2))


def test_the_command_measures_and_writes_what_it_measured(capsys, tmp_path):
    path = tmp_path / "profile.json"
    words = ["partition", "--ranks", "2", "--bandwidth", "1e9"]
    model = ["--model.layers", "2", "--model.width", "16", "--model.heads", "2", "--model.sequence_length", "8"]
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    assert main([*words, *model, "--batch", "3", "--write-profile", str(path), "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)
    assert main([*words, "--profile", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == first
    assert parse_profile(path.read_text()).layers[1].activation_bytes == 3 * 8 * 16 * 4
    assert main([*words, *model, "--batch", "0"]) == 2
    assert "batch 0" in capsys.readouterr().err
    assert main([*words, *model, "--write-profile", str(tmp_path)]) == 2
    assert "must be writable" in capsys.readouterr().err
