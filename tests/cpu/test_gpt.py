"""The small GPT: causal, the same however it is cut, initialised by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pipeloom as pl
from pipeloom.errors import InputError
from pipeloom.models import GPT, GPTConfig, init_parameters, loss_fn, materialize
from pipeloom.split import Stages, split
from tests.cpu.pairwise import in_turn

SMALL = {"vocabulary_size": 17, "layers": 4, "width": 12, "heads": 3, "sequence_length": 10}
VARIANTS = [
    {"positions": positions, "tie_embeddings": tied} for positions in ("rotary", "learned") for tied in (True, False)
]


def build(seed: int = 0, **changes) -> GPT:
    model = GPT(GPTConfig(**{**SMALL, **changes}))
    init_parameters(model, seed=seed)
    return model


def tokens(batch: int = 3, length: int = 10, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, 17, (batch, length), generator=generator).to(dtype)


def chain(modules, value):
    for module in modules:
        value = module(value)
    return value


@pytest.mark.parametrize(("variant", "num_stages"), in_turn(VARIANTS, [1, 2, 3, 4]), ids=str)
def test_stages_built_apart_are_the_uncut_model(variant, num_stages):
    """Outputs and float64 gradients, bitwise; every stage materialised alone from a meta model of its own."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        whole = build(seed=3, **variant)
        stages = []
        for stage in range(num_stages):
            with torch.device("meta"):
                cut = split(GPT(GPTConfig(**SMALL, **variant)), num_stages)
            materialize(cut.modules[stage], 3)
            stages.append(cut.modules[stage])
    finally:
        torch.set_default_dtype(default)
    x, y = tokens(), tokens().roll(1, 1)
    expected, got = loss_fn(whole(x), y), loss_fn(chain(stages, x), y)
    assert torch.equal(chain(stages, x), whole(x))
    expected.backward()
    got.backward()
    gradients: dict[str, torch.Tensor] = {}
    for module in stages:
        for name, parameter in module.named_parameters():
            name = module.canonical_names.get(name, name)
            gradients[name] = gradients[name] + parameter.grad if name in gradients else parameter.grad
    assert gradients.keys() == dict(whole.named_parameters()).keys()
    for name, parameter in whole.named_parameters():
        assert parameter.grad.dtype == torch.float64
        if name == "embedding.weight":  # tied across stages: to the order of summation
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-12, atol=1e-14)
        else:
            assert torch.equal(gradients[name], parameter.grad), name


def test_initial_values_follow_from_seed_and_name_alone():
    values = dict(build(seed=1).named_parameters())
    for name, value in build(seed=1, positions="learned").named_parameters():
        assert name == "embedding.positions" or torch.equal(value, values[name])
    other = dict(build(seed=2).named_parameters())
    assert not torch.equal(other["blocks.0.qkv.weight"], values["blocks.0.qkv.weight"])
    assert not torch.equal(values["blocks.1.qkv.weight"], values["blocks.0.qkv.weight"])
    wrapped = GPT(GPTConfig(**SMALL))
    wrapped.blocks[1] = torch.compile(wrapped.blocks[1], backend="eager")
    init_parameters(wrapped, seed=1)
    assert torch.equal(wrapped.blocks[1].qkv.weight, values["blocks.1.qkv.weight"])


def test_initial_values_have_gpt2_spreads():
    model = build(width=96, layers=8, vocabulary_size=256)
    for name, expected in {"qkv": 0.02, "mlp_up": 0.02, "attention_out": 0.02 / 4, "mlp_down": 0.02 / 4}.items():
        assert model.blocks[3].get_submodule(name).weight.std().item() == pytest.approx(expected, rel=0.05)
    assert torch.equal(model.norm.weight, torch.ones(96))
    logits = model(torch.randint(0, 256, (4, 10)))
    assert F.cross_entropy(logits.flatten(0, 1), torch.randint(0, 256, (40,))).item() == pytest.approx(5.545, abs=0.15)


def test_materialize_keeps_ties_within_a_stage_and_rebuilds_tables():
    with torch.device("meta"):
        stage = split(GPT(GPTConfig(**SMALL)), 1).modules[0]
    materialize(stage, 0)
    assert stage.head.weight is stage.embedding.weight
    expected = build().blocks[0].rotary
    assert torch.equal(stage.blocks.get_submodule("0").rotary.sin, expected.sin)
    assert not any("rotary" in name for name in stage.state_dict())


def test_materialize_asks_for_a_way_to_rebuild_a_buffer():
    class Mystery(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.ones(3, device="meta"))

    with pytest.raises(InputError, match=r"'0\.table'.*reset_buffers"):
        materialize(nn.Sequential(Mystery()), 0)
    norm = nn.BatchNorm1d(3, device="meta")
    materialize(norm, 0)
    assert torch.equal(norm.running_var, torch.ones(3))


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_no_token_sees_a_later_one(variant):
    model = build(**variant)
    x = tokens()
    changed = x.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % 17
    assert torch.equal(model(x)[:, :6], model(changed)[:, :6])
    assert not torch.equal(model(x)[:, 6], model(changed)[:, 6])


def test_order_matters_to_rotary_and_short_sequences_are_prefixes():
    model = build().double()
    x = tokens()
    assert not torch.allclose(model(x)[:, -1], model(torch.cat([x[:, :-1].flip(1), x[:, -1:]], 1))[:, -1])
    torch.testing.assert_close(model(x[:, :4]), model(x)[:, :4], rtol=1e-10, atol=1e-12)
    with pytest.raises(InputError, match="11 tokens"):
        model(tokens(length=11))


def test_rotary_is_a_rotation_by_relative_position():
    """Against the paper's formula in complex numbers (arXiv:2104.09864, eq. 12-14), for queries, keys and values."""
    model = GPT(GPTConfig(**{**SMALL, "width": 24}))
    rotary = model.blocks[0].rotary.double()
    qkv = torch.randn(2, 10, 3, 3, 8, dtype=torch.float64)
    angle = torch.outer(torch.arange(10.0, dtype=torch.float64), 10000.0 ** (-torch.arange(4.0) / 4).double())
    pairs = torch.complex(qkv[..., :4], qkv[..., 4:])
    turned = pairs * torch.polar(torch.ones_like(angle), angle)[None, :, None, None, :]
    turned[:, :, 2] = pairs[:, :, 2]
    expected = torch.cat([turned.real, turned.imag], -1)
    torch.testing.assert_close(rotary(qkv), expected, rtol=1e-6, atol=1e-6)  # tables were made in float32


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_any_integer_type_of_token(dtype):
    model = build()
    x = tokens(dtype=dtype)
    assert torch.equal(model(x), model(x.long()))
    assert torch.equal(loss_fn(model(x), x), loss_fn(model(x), x.long()))


def test_dropout_only_in_training():
    model = build(dropout=0.3)
    x = tokens()
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))
    assert torch.equal(model(x), build()(x))


@pytest.mark.parametrize("positions", ["rotary", "learned"])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_queries_are_full_heads_with_repeated_keys(positions, kv_heads):
    sizes = {"width": 24, "heads": 4, "positions": positions}
    grouped, full = build(**sizes, kv_heads=kv_heads).double(), build(**sizes).double()
    for block, other in zip(grouped.blocks, full.blocks, strict=True):
        with torch.no_grad():
            q, k, v = block.qkv.weight.split([24, 6 * kv_heads, 6 * kv_heads])
            repeated = [part.view(-1, 6, 24).repeat_interleave(4 // kv_heads, 0).flatten(0, 1) for part in (k, v)]
            other.qkv.weight.copy_(torch.cat([q, *repeated]))
    x = tokens()
    torch.testing.assert_close(grouped(x), full(x), rtol=1e-12, atol=1e-14)
    loss_fn(grouped(x), x).backward()
    loss_fn(full(x), x).backward()
    torch.testing.assert_close(grouped.embedding.weight.grad, full.embedding.weight.grad, rtol=1e-10, atol=1e-14)
    own, whole = grouped.blocks[1].qkv.weight.grad, full.blocks[1].qkv.weight.grad
    summed = whole[24:48].view(kv_heads, -1, 6, 24).sum(1).flatten(0, 1)
    torch.testing.assert_close(own[24 : 24 + 6 * kv_heads], summed, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("variant", [*VARIANTS, {"kv_heads": 1}], ids=str)
def test_number_of_parameters(variant):
    config = GPTConfig(**SMALL, **variant)
    assert config.num_parameters == sum(p.numel() for p in GPT(config).parameters())


def test_it_learns_to_count():
    model = build(width=24, heads=2, layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    start = torch.arange(17)[:, None]
    x = (start + torch.arange(11)) % 17
    for _ in range(60):
        optimizer.zero_grad()
        loss = loss_fn(model(x[:, :-1]), x[:, 1:])
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.7  # 2.83 nats before


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"width": 13}, r"heads=1\.$"),
        ({"width": 64, "heads": 5}, r"heads=4\.$"),
        ({"width": 9, "heads": 3}, "need an even one"),
        ({"width": 24, "heads": 12, "kv_heads": 5}, r"kv_heads=5: must .* divide heads=12. Use kv_heads=4\.$"),
        ({"kv_heads": 0}, r"Use kv_heads=1\.$"),
        ({"layers": 0}, "layers=0"),
        ({"vocabulary_size": -1}, "vocabulary_size=-1"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"positions": "alibi"}, "GPTConfig.positions='alibi': must be one of rotary, learned"),
    ],
)
def test_bad_sizes_are_refused_in_one_line(changes, said):
    with pytest.raises(InputError, match=said) as error:
        GPTConfig(**{**SMALL, **changes})
    assert "\n" not in str(error.value)


def _tied_stages(num_stages: int, *, one_by_one: bool, seeds: tuple[int, int] = (0, 0)) -> Stages:
    with torch.device("meta"):
        model = GPT(GPTConfig(**SMALL, tie_embeddings=True))
    if not one_by_one:
        materialize(model, 0)
    stages = split(model, num_stages)
    for stage in range(num_stages) if one_by_one else ():
        materialize(stages.modules[stage], seeds[stage == num_stages - 1])
    return stages


@pytest.mark.parametrize("name", ["zb-v", "chimera", "dualpipe"])
def test_a_tied_parameter_of_two_stages_of_a_rank_is_one_although_each_stage_got_its_values_alone(name):
    schedule = pl.schedules.build(name, num_ranks=2, num_microbatches=4)
    losses = []
    for one_by_one in (True, False):
        stages = _tied_stages(schedule.num_stages, one_by_one=one_by_one)
        with pl.Pipeline(stages, schedule, loss_fn=loss_fn, transport="loopback") as pipe:
            optimizer = torch.optim.SGD(pipe.parameters(), lr=0.5)
            for _ in range(3):
                optimizer.zero_grad()
                losses.append(float(pipe.step(tokens(4), tokens(4).roll(1, 1))))
                optimizer.step()
    assert losses[:3] == losses[3:]


def test_different_values_of_a_tied_parameter_on_a_rank_are_refused():
    schedule = pl.schedules.build("zb-v", num_ranks=2, num_microbatches=4)
    with pytest.raises(InputError, match=r"'embedding\.weight' and 'head\.weight' are one .* values on rank 0"):
        pl.Pipeline(_tied_stages(4, one_by_one=True, seeds=(0, 1)), schedule, loss_fn=loss_fn, transport="loopback")
