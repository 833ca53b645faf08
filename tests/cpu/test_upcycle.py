"""A dense checkpoint becomes a mixture: copies of the MLP, equal output, optimizer states, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from pipeloom import cli
from pipeloom.errors import CheckpointError, InputError
from pipeloom.models import GPT, GPTConfig, init_parameters
from pipeloom.train import checkpoint
from pipeloom.train.upcycle import upcycle

SIZES = ["--model.layers", "4", "--model.width", "16", "--model.heads", "2", "--model.sequence_length", "32"]
RUN = ["train", "--local", *SIZES, "--batch.size", "8", "--eval_steps", "0", "--sample_tokens", "0"]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output directory of a dense run of two steps, on two pipeline ranks."""
    directory = tmp_path_factory.mktemp("dense")
    (directory / "text").mkdir()
    (directory / "text" / "a.txt").write_text("the quick brown fox jumps over the lazy dog, again and again. " * 200)
    out = directory / "run"
    assert cli.main([*RUN, "--data.path", str(directory / "text"), "--steps", "2", "--output_dir", str(out)]) == 0
    return out


def model_of(path: Path) -> GPT:
    saved = checkpoint.load(path)
    model = GPT(GPTConfig(**saved.state["model"]))
    model.load_state_dict({name: saved.tensor(name) for name in saved.names})
    return model.eval()


@pytest.mark.parametrize(
    "settings",
    [
        {"experts": 4, "experts_every": 2},
        {"experts": 3, "top_k": 1},
        {"experts": 4, "router": "noisy-topk", "top_k": 3},
        {"experts": 4, "router": "sigmoid", "experts_every": 4},
        {"experts": 4, "router": "glam", "capacity_factor": 4.0},
    ],
    ids=str,
)
def test_a_mixture_has_the_output_of_the_dense_model(dense: Path, tmp_path: Path, settings: dict):
    found = upcycle(dense, tmp_path / "mixture", seed=5, **settings)
    every = settings.get("experts_every", 1)
    assert found.blocks == [index for index in range(4) if (index + 1) % every == 0]
    assert 0 <= found.largest_difference < 1e-12
    before, after = model_of(dense), model_of(tmp_path / "mixture")
    assert sum(p.numel() for p in after.parameters()) == found.mixture.num_parameters
    tokens = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted, logits = before.double()(tokens), after.double()(tokens)
    assert torch.allclose(logits, wanted, rtol=1e-12, atol=1e-12)
    drawn = GPT(found.mixture)
    init_parameters(drawn, seed=5)
    for index in found.blocks:
        old, new = before.blocks[index], after.blocks[index].experts
        assert all(torch.equal(up, old.mlp_up.weight) for up in new.up)
        assert all(torch.equal(down, old.mlp_down.weight) for down in new.down)
        assert torch.equal(new.router.weight, drawn.blocks[index].experts.router.weight.double())


@pytest.mark.parametrize("kept", ["copy", "drop"])
def test_optimizer_states_are_copied_or_dropped(dense: Path, tmp_path: Path, kept: str):
    upcycle(dense, tmp_path / "mixture", experts=2, optimizer=kept)
    before, after = (checkpoint.load(path).optimizer_state() for path in (dense, tmp_path / "mixture"))
    names = {name for group in after.groups for name in group["parameters"]}
    assert names == {name for name, _ in model_of(tmp_path / "mixture").named_parameters()}
    if kept == "drop":
        assert not after.tensors
        return
    assert names - set(after.tensors) == {f"blocks.{index}.experts.router.weight" for index in range(4)}
    for old, new in (("mlp_up.weight", "experts.up"), ("mlp_down.weight", "experts.down")):
        wanted, found = before.tensors[f"blocks.2.{old}"], after.tensors[f"blocks.2.{new}"]
        assert torch.equal(found["step"], wanted["step"])
        assert torch.equal(found["exp_avg_sq"], torch.stack([wanted["exp_avg_sq"]] * 2))
    assert all(
        torch.equal(before.tensors[n][k], v) for n in before.tensors if n in names for k, v in after.tensors[n].items()
    )


def test_a_mixture_is_trained_on(dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The command that `convert` prints; the first loss is that of the dense model."""
    assert cli.main(["checkpoint", "convert", str(dense), str(tmp_path / "mixture"), "--upcycle", "2"]) == 0
    said = capsys.readouterr().out
    assert "4 blocks with 2 experts" in said
    command = said.partition("train it: pipeloom ")[2].split()
    text = ["--data.path", str(dense.parent / "text"), "--steps", "3"]
    more = ["--local", "--batch.size", "8", "--eval_steps", "0", "--sample_tokens", "0"]
    assert cli.main([*command, *text, *more]) == 0
    again = ["--resume_from_checkpoint", str(dense / "checkpoint-2"), "--output_dir", str(tmp_path / "dense")]
    assert cli.main([*RUN, *text, *again]) == 0
    losses = [
        json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[-1])["loss"]
        for name in ("mixture", "dense")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"experts": 4, "router": "switch"}, "router=switch: multiplies the expert's result by its probability"),
        ({"experts": 4, "router": "gshard"}, "router=gshard: leaves out second choices at random"),
        ({"experts": 4, "router": "expert-choice"}, "router=expert-choice: gives a token any number of experts"),
        ({"experts": 1}, "experts=1: a mixture has at least 2."),
        ({"experts": 2, "top_k": 3}, "model top_k=3: must be at most experts=2"),
        ({"experts": 2, "shared_experts": 1}, "shared_experts=1: an expert is a copy of the MLP"),
        ({"experts": 2, "experts_every": 5}, "model experts_every=5: must be from 1 to layers=4"),
    ],
)
def test_mixtures_of_other_output_are_refused(dense: Path, tmp_path: Path, settings: dict, message: str):
    with pytest.raises(InputError) as refused:
        upcycle(dense, tmp_path / "mixture", **settings)
    assert message in str(refused.value)
    assert not (tmp_path / "mixture").exists()


def test_what_is_no_dense_checkpoint_is_refused(dense: Path, tmp_path: Path):
    upcycle(dense, tmp_path / "mixture", experts=2)
    with pytest.raises(CheckpointError, match="has 2 experts already"):
        upcycle(tmp_path / "mixture", tmp_path / "again", experts=2)
    with pytest.raises(InputError, match="exists and is not an empty directory"):
        upcycle(dense, tmp_path / "mixture", experts=2)
    checkpoint.save(tmp_path / "other", 1, model={"w": torch.zeros(2)})
    with pytest.raises(CheckpointError, match="was not written by `pipeloom train`"):
        upcycle(tmp_path / "other", tmp_path / "again", experts=2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--router", "topk"], "--router topk: has no effect without --upcycle."),
        (["--upcycle", "2", "--single"], "--single: does not work with --upcycle"),
    ],
)
def test_wrong_options_are_refused_in_one_line(dense: Path, tmp_path: Path, capsys, words: list[str], message: str):
    assert cli.main(["checkpoint", "convert", str(dense), str(tmp_path / "out"), *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_the_mlp_is_that_of_the_gpt():
    """`upcycle` compares experts with down(gelu(up(x)))."""
    block = GPT(GPTConfig(layers=1, width=8, heads=2)).blocks[0].double()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(parameter.numel()))
    x = torch.randn(1, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    wanted = F.linear(F.gelu(F.linear(x, block.mlp_up.weight)), block.mlp_down.weight)
    assert torch.equal(block.mlp(x), wanted)


@pytest.mark.parametrize("optimizer", ["adafactor", "momentum"])
def test_states_that_are_not_elementwise_are_resumed(tmp_path: Path, optimizer: str):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    more = ["--optimizer.name", optimizer, "--data.path", str(tmp_path / "text"), "--output_dir"]
    assert cli.main([*RUN, *more, str(tmp_path / "run"), "--steps", "1"]) == 0
    upcycle(tmp_path / "run", tmp_path / "mixture", experts=3)
    mixture = [
        *more,
        str(tmp_path / "mixture"),
        "--model.experts",
        "3",
        "--resume_from_checkpoint",
        "auto",
        "--steps",
        "2",
    ]
    assert cli.main([*RUN, *mixture]) == 0
    states = checkpoint.load(tmp_path / "mixture").optimizer_state().tensors["blocks.0.experts.up"]
    assert all(value.shape[0] == 3 for value in states.values() if value.dim() > 1)
