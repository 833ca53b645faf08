"""Profiles of models that can be cut: what is measured is what the layers send and hold."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipeloom as pl
from pipeloom.cli import main
from pipeloom.errors import SplitError
from pipeloom.models import GPT, GPTConfig, init_parameters, loss_fn
from pipeloom.plan.partition import Problem, Profile, parse_profile, partition_layers
from pipeloom.split import profile_graph, profile_layers, profile_model, split


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
    profile = Profile.of(*profile_model(model, (x, y), loss_fn=F.cross_entropy, num_rounds=1))
    assert [layer.name for layer in profile.layers] == ["0", "1", "2", "3"]
    assert [layer.activation_bytes for layer in profile.layers] == [16 * 32, 16 * (32 + 8), 16 * 32, 16 * 12]
    assert [layer.parameter_bytes for layer in profile.layers] == [4 * 40, 0, 0, 4 * 24]
    assert [layer.kept_bytes for layer in profile.layers] == [16 * 16, 0, 0, 16 * 32]  # inputs of the products
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
    profile = Profile.of(*profile_model([Work(1.0), Work(200.0), Work(1.0)], torch.randn(64, 64)))
    assert [layer.forward_seconds for layer in profile.layers] == [1.0, 200.0, 1.0]
    found = partition_layers(profile, [(8, 1e12)])
    slow = next(stage for stage in found.stages if stage.first <= 1 <= stage.last)
    assert slow.replicas >= 6


def test_layers_that_work_in_place():
    """On what a leaf would be in a stage of its own; the sample stays as it is."""
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Flatten())
    x = torch.randn(2, 3, 8, 8)
    before = x.clone()
    profile = Profile.of(*profile_model(model, x, num_rounds=1))
    assert [layer.activation_bytes for layer in profile.layers] == [2 * 3 * 64 * 4] + [2 * 4 * 36 * 4] * 3
    assert torch.equal(x, before)


def test_a_block_model_and_its_loss():
    config = GPTConfig(layers=2, width=16, heads=2, sequence_length=12, vocabulary_size=50)  # head and embedding tied
    model = GPT(config)
    init_parameters(model, seed=0)
    tokens = torch.randint(50, (3, 12))
    profile = Profile.of(*profile_model(model, (tokens, tokens), loss_fn=loss_fn, num_rounds=1))
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
    profile = Profile.of(*profile_model(model, torch.randint(40, (2, 8)), num_rounds=1))
    assert [layer.name for layer in profile.layers] == [
        "model.embed_tokens",
        "model.layers.0",
        "model.layers.1",
        "model.norm",
        "lm_head",
    ]
    assert sum(layer.parameter_bytes for layer in profile.layers) == 4 * sum(p.numel() for p in model.parameters())
    assert profile.layers[1].activation_bytes == 2 * 8 * 16 * 4 + 2 * 8 * 8  # hidden states, token ids


class Untidy(nn.Module):
    """A tied head, one matrix in two blocks, a frozen layer, a layer with a buffer alone, an odd number of layers."""

    pipeline_layers = ("embedding", "blocks.*", "scale", "head")

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(30, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(4))
        self.blocks[3][0].weight = self.blocks[1][0].weight
        self.blocks[3][2].weight = self.blocks[1][2].weight
        self.blocks[2].requires_grad_(False)
        self.scale = nn.BatchNorm1d(6, affine=False)
        self.head = nn.Linear(6, 30)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.scale(x))


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=3, n_embd=8, n_head=2, n_positions=16, vocab_size=40, bos_token_id=0, eos_token_id=0
        )
    )


@pytest.mark.parametrize(
    ("make", "sample", "ties"),
    [
        (Untidy, torch.arange(12), [(30 * 6 * 4, (0, 6)), (2 * 6 * 6 * 4, (2, 4))]),
        (gpt2, torch.zeros(2, 16, dtype=torch.long), [(40 * 8 * 4, (0, 7))]),
    ],
)
def test_stages_of_layers_that_share_weights_have_the_bytes_of_their_modules(make, sample, ties):
    model = make()
    profile = Profile.of(*profile_model(model, sample, num_warmups=0, num_rounds=1))
    assert list(profile.ties) == ties
    assert parse_profile(profile.to_json()) == profile
    weights, count = Problem(profile, [(1, 1.0)]).weights, len(profile.layers)
    for first in range(count):
        for last in range(first, count):
            counts = [n for n in (first, last - first + 1, count - last - 1) if n]
            stages = split(model, len(counts), cut=counts).modules
            held = sum(p.nbytes for p in stages[first > 0].parameters())
            assert weights[first, last] == held, (first, last)
    assert weights[0, count - 1] == sum(p.nbytes for p in model.parameters())


def test_cutting_by_parameters_counts_what_a_stage_shares_inside_once():
    """The first three layers are one matrix: together they weigh as much as the last."""
    layers = [nn.Linear(4, 4, bias=False) for _ in range(4)]
    for layer in layers[1:3]:
        layer.weight = layers[0].weight
    stages = split(nn.Sequential(*layers), 2, cut="parameters")
    assert stages.layers == (("0", "1", "2"), ("3",))


def test_what_cannot_be_cut_is_refused():
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)

    with pytest.raises(SplitError, match=r"is not a plain nn.Sequential"):
        profile_model(Whole(), torch.zeros(1, 2))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(SplitError, match="meta device"):
        profile_model(model, torch.zeros(1, 2))


def test_what_the_command_says_of_python_trains_the_model(capsys, tmp_path):
    """An odd number of layers, one of them frozen, one with buffers alone; no two stages of the same size."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 4))
    model[1].requires_grad_(False)
    rows = [(name, 1.0, 2.0, 64.0, 80.0) for name, _ in model.named_children()]
    (tmp_path / "profile.json").write_text(Profile.of(rows).to_json())
    words = ["--profile", str(tmp_path / "profile.json"), "--ranks", "4", "--bandwidth", "100"]
    assert main(["partition", *words]) == 0
    [said] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("train it in Python: ")]
    call = said.removeprefix("train it in Python: ").replace("...", "model").removesuffix(")")
    pipe = eval(f"{call}, loss_fn=F.mse_loss)", {"pl": pl, "model": model, "F": F})
    matrices = [layer.weight for layer in model if isinstance(layer, nn.Linear)]  # biases vanish in the norm
    before = [matrix.detach().clone() for matrix in matrices]
    with pipe:
        optimizer = torch.optim.SGD([p for p in pipe.parameters() if p.requires_grad], lr=0.1)
        assert len(pl.Stream(pipe, optimizer).run([(torch.randn(4, 4), torch.randn(4, 4))] * 12)) == 12
    assert [not torch.equal(*pair) for pair in zip(before, matrices, strict=True)] == [True, False, True, True]


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
    assert "batch=0: must be at least 1 sequence" in capsys.readouterr().err
    assert main([*words, *model, "--write-profile", str(tmp_path)]) == 2
    assert ": is a directory. Use the path of a file." in capsys.readouterr().err


class Branches(nn.Module):
    """An encoder that two layers of a decoder read, and weights that encoder and decoder share."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))
        self.encoder = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        self.third.weight = self.first.weight
        self.scale = nn.BatchNorm1d(8)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.encoder(source)
        here = self.second(self.first(target) + memory)
        return self.scale(self.third(here + memory))


def test_a_traced_model_is_a_graph_of_calls():
    torch.manual_seed(0)
    model = Branches()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    example = (torch.randn(4, 8), torch.randn(4, 8))
    rows, ties, edges = profile_graph(model, example, num_rounds=1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    names = [row.name for row in rows]
    encoder, first, second, third, scale = map(names.index, ("encoder", "first", "second", "third", "scale"))
    readers = {target for source, target in edges if source == encoder}
    assert len(readers) == 2
    assert all(source < target for source, target in edges)
    assert {first, second, third} & {source for source, _ in edges} == {first, second, third}
    assert all(row.forward_seconds > 0 and row.backward_seconds >= 0 for row in rows)
    assert rows[encoder].activation_bytes == rows[scale].activation_bytes == 4 * 8 * 4
    assert rows[encoder].parameter_bytes == 2 * 72 * 4
    assert sum(row.parameter_bytes for row in rows) == 4 * (64 + sum(p.numel() for p in model.parameters()))
    assert ties == [(64 * 4, (first, third))]
    profile = Profile.of(rows, ties, edges=edges)
    assert parse_profile(profile.to_json()) == profile
    found = partition_layers(profile, [(2, 1e12)])
    assert found.all_cuts
    assert sum(stage.replicas for stage in found.stages) == 2
