"""The models of the benchmark: GPTs, and blocks with gated experts by pipeloom, transformers and DeepSpeed."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipeloom as pl
from pipeloom.autograd.grouped_linear import grouped_linear
from pipeloom.models import GPT, GPTConfig, init_parameters, loss_fn
from pipeloom.models.experts import Experts, take_over
from pipeloom.models.gpt import Block

EXPERTS, TOP_K = 8, 2


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A model and its micro-batch. A dense MLP is as wide as the experts of one token together."""

    width: int
    samples: int
    length: int = 256
    layers: int = 2
    vocabulary: int = 512

    def config(self, **changes: Any) -> GPTConfig:
        return GPTConfig(
            vocabulary_size=self.vocabulary,
            layers=self.layers,
            width=self.width,
            heads=self.width // 64,
            sequence_length=self.length,
            **changes,
        )

    @property
    def mlp_width(self) -> int:
        return 4 * self.width

    def tokens(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(11)
        tokens = torch.randint(self.vocabulary, (self.samples, self.length + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class System:
    """A model and its training step: forward and backward of one micro-batch, whose gradients add to others.

    Losses that the model declares are part of the step.
    """

    def __init__(self, model: nn.Module, sizes: Sizes) -> None:
        self.model, self._batch = model, sizes.tokens()
        for parameter in model.parameters():  # as in every micro-batch but the first
            parameter.grad = torch.zeros_like(parameter)

    def take_part(self, index: int, number: int) -> None:
        """Take one of `number` equal parts of the samples from now on."""
        inputs, targets = self._batch
        self._batch = inputs.chunk(number)[index], targets.chunk(number)[index]

    def step(self, *, declared: bool = True) -> Tensor:
        inputs, targets = self._batch
        with pl.auxiliary_losses() as found:
            loss = loss_fn(self.model(inputs), targets)
        (loss + found.total() if declared and found.losses else loss).backward()
        return loss.detach()

    def gradients(self) -> list[Tensor]:
        """Those of one step, without declared losses; afterwards they are 0 again."""
        self.step(declared=False)
        found = []
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            found.append(parameter.grad.clone())
            parameter.grad.zero_()
        return found


# Part `gpt`: pipeloom's GPT


def gpt(sizes: Sizes, router: str | None, *, plain: bool = False) -> System:
    """A GPT, dense or with experts in every block; `plain`: with a loop over experts in place of grouped products."""
    if router is None:
        model = GPT(sizes.config())
    else:
        each = sizes.mlp_width // (1 if router == "switch" else TOP_K)
        model = GPT(sizes.config(experts=EXPERTS, router=router, expert_width=each))
    init_parameters(model, seed=3)
    for layer in model.modules() if plain else ():
        if isinstance(layer, Experts):
            layer.compute = _loop(layer)  # type: ignore[method-assign]
    if router in ("switch", "noisy-topk"):  # their random numbers would differ between two models
        model.eval()
    return System(model, sizes)


class _EvenExperts(nn.Module):
    """The products of experts with even loads: every token goes through two of them, nothing is routed or sorted.

    As many parameters and products as a mixture; what routing adds to it is what the mixture takes longer.
    """

    def __init__(self, width: int, inner: int, *, gated: bool) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(EXPERTS, (1 + gated) * inner, width))
        self.down = nn.Parameter(torch.empty(EXPERTS, width, inner))
        self._gated = gated

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).repeat(TOP_K, 1)
        counts = torch.full((EXPERTS,), rows.shape[0] // EXPERTS)
        inside = grouped_linear(rows, self.up, counts)
        if self._gated:
            gate, up = inside.chunk(2, -1)
            inside = F.silu(gate) * up
        else:
            inside = F.gelu(inside)
        return grouped_linear(inside, self.down, counts).view(TOP_K, *x.shape).sum(0)


def even_experts(sizes: Sizes, *, gated: bool = False) -> System:
    """A GPT with even loads in place of routed experts."""
    model = GPT(sizes.config())
    inner = sizes.mlp_width // TOP_K
    model.blocks = nn.ModuleList(
        _Block(sizes.config(), _EvenExperts(sizes.width, inner, gated=gated)) for _ in range(sizes.layers)
    )
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_(_drawn(parameter.shape, index) if parameter.dim() > 1 else torch.ones(parameter.shape))
    return System(model, sizes)


def _loop(layer: Experts) -> Callable[[Tensor, Tensor], Tensor]:
    def compute(rows: Tensor, counts: Tensor) -> Tensor:
        parts = []
        assert layer.up is not None
        for part, up, down in zip(rows.split(counts.tolist()), layer.up, layer.down, strict=True):
            parts.append(F.linear(F.gelu(F.linear(part, up)), down))
        return torch.cat(parts)

    return compute


# Part `layers`: gated experts of several libraries in the same blocks


class Gated(nn.Module):
    """silu(gate) * up, then down."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        result: Tensor = self.down(F.silu(gate) * up)
        return result


class _Block(Block):
    """A block of the GPT with another MLP."""

    def __init__(self, config: GPTConfig, inner: nn.Module) -> None:
        super().__init__(config)
        self.mlp_up = self.mlp_down = None
        self.inner = inner

    def mlp(self, x: Tensor) -> Tensor:
        found = self.inner(x)
        result: Tensor = found[0] if isinstance(found, tuple) else found
        return result


def layers(sizes: Sizes, kind: str) -> System:
    """A GPT whose blocks have the gated MLP or experts of `kind`. All mixtures have equal weights."""
    model = GPT(sizes.config())
    model.blocks = nn.ModuleList(_Block(sizes.config(), MAKERS[kind](sizes)) for _ in range(sizes.layers))
    with torch.no_grad():
        shared = [parameter for name, parameter in model.named_parameters() if ".inner." not in name]
        for index, parameter in enumerate(shared):
            parameter.copy_(_drawn(parameter.shape, index) if parameter.dim() > 1 else torch.ones(parameter.shape))
        for index, block in enumerate(model.blocks):
            if kind == "dense":
                for number, parameter in enumerate(block.inner.parameters()):
                    parameter.copy_(_drawn(parameter.shape, 100 * index + number))
            else:
                _set_weights(block.inner, sizes, index)
    return System(model, sizes)


def _drawn(shape: Any, seed: int) -> Tensor:
    return 0.02 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _set_weights(layer: Any, sizes: Sizes, index: int) -> None:
    inner, width = sizes.mlp_width // TOP_K, sizes.width
    router = 10 * _drawn((EXPERTS, width), 1000 + index)
    gate_up, down = _drawn((EXPERTS, 2 * inner, width), 2000 + index), _drawn((EXPERTS, width, inner), 3000 + index)
    if isinstance(layer, Experts):
        layer.router.weight.copy_(router)
        assert layer.gate_up is not None
        layer.gate_up.copy_(gate_up)
        layer.down.copy_(down)
    elif hasattr(layer, "gate"):
        layer.gate.weight.copy_(router)
        layer.experts.gate_up_proj.copy_(gate_up)
        layer.experts.down_proj.copy_(down)
    else:
        layer.deepspeed_moe.gate.wg.weight.copy_(router)
        held = layer.deepspeed_moe.experts.deepspeed_experts
        start = len(held) * torch.distributed.get_rank()
        for number, expert in enumerate(held, start):
            expert.gate_up.weight.copy_(gate_up[number])
            expert.down.weight.copy_(down[number])


def _pipeloom(sizes: Sizes) -> nn.Module:
    return Experts(sizes.width, experts=EXPERTS, expert_width=sizes.mlp_width // TOP_K, top_k=TOP_K, gated=True)


def _mixtral(sizes: Sizes, implementation: str) -> nn.Module:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(
        hidden_size=sizes.width,
        intermediate_size=sizes.mlp_width // TOP_K,
        num_local_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
    )
    config._experts_implementation = implementation
    return MixtralSparseMoeBlock(config)


def _taken_over(sizes: Sizes) -> nn.Module:
    block = _mixtral(sizes, "eager")
    take_over(block)
    return block


def _deepspeed(sizes: Sizes, processes: int = 1) -> nn.Module:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    from deepspeed.moe.layer import MoE

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    layer = MoE(
        sizes.width,
        Gated(sizes.width, sizes.mlp_width // TOP_K),
        num_experts=EXPERTS,
        ep_size=processes,
        k=TOP_K,
        drop_tokens=False,
        use_rts=False,
        top2_2nd_expert_sampling=False,
    )
    layer.set_deepspeed_parallelism()
    return layer  # type: ignore[no-any-return]


MAKERS: dict[str, Callable[[Sizes], nn.Module]] = {
    "dense": lambda sizes: Gated(sizes.width, sizes.mlp_width),
    "pipeloom": _pipeloom,
    "pipeloom take_over": _taken_over,
    "transformers eager": lambda sizes: _mixtral(sizes, "eager"),
    "transformers grouped_mm": lambda sizes: _mixtral(sizes, "grouped_mm"),
    "deepspeed": _deepspeed,
    "deepspeed ep": lambda sizes: _deepspeed(sizes, torch.distributed.get_world_size()),
}
