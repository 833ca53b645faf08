"""Makes a mixture of experts of a dense checkpoint (sparse upcycling, arXiv:2212.05055, section 3).

    dense                              mixture, in every `experts_every`-th block
    blocks.3.mlp_up.weight   [F, W]    blocks.3.experts.up             [E, F, W], E copies
    blocks.3.mlp_down.weight [W, F]    blocks.3.experts.down           [E, W, F], E copies
    -                                  blocks.3.experts.router.weight  [E, W], drawn from seed and name
    everything else                    the same

Copies of one MLP, weighted by gates that sum to one, have the MLP's output. So the first loss of the mixture is that of
the dense model, as long as no token is over capacity.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from pipeloom.common.checkpoint_key import CheckpointKey
from pipeloom.errors import CheckpointError, InputError
from pipeloom.models import GPTConfig, init_parameters
from pipeloom.models.experts import Experts
from pipeloom.train import checkpoint
from pipeloom.train.checkpoint.state import OptimizerState
from pipeloom.train.config.sections import ModelSizes

_UNEQUAL = {
    "switch": "multiplies the expert's result by its probability, about 1 / experts",
    "gshard": "leaves out second choices at random, and their gates with them",
    "expert-choice": "gives a token any number of experts, whose gates do not sum to one",
}
_FIRST, _SECOND = "mlp_up.weight", "mlp_down.weight"
_TOLERANCE = 1e-12  # relative, in float64
_TOKENS = 64  # that compare an MLP with its copies


@dataclass(frozen=True, slots=True, kw_only=True)
class Upcycled:
    """What `upcycle` wrote.

    Attributes:
        path: the checkpoint.
        step: its training step.
        dense, mixture: the sizes before and after.
        blocks: the blocks that have experts.
        largest_difference: between the outputs of an MLP and of its copies, relative to the largest output.
    """

    path: Path
    step: int
    dense: GPTConfig
    mixture: GPTConfig
    blocks: list[int]
    largest_difference: float


def upcycle(
    source: Path,
    out: Path,
    *,
    experts: int,
    optimizer: Literal["copy", "drop"] = "copy",
    seed: int = 0,
    key: CheckpointKey | None = None,
    **settings: Any,
) -> Upcycled:
    """Write the mixture of a dense checkpoint to ``out/checkpoint-N``, with the step and the data position of `source`.

    The new checkpoint loads with any degrees, also expert-parallel ones.

    Args:
        source: a checkpoint of `pipeloom train`, or its output directory.
        out: a new output directory.
        experts: number of experts per block that has experts.
        optimizer: "copy" gives every expert the optimizer state of its MLP; "drop" starts all states anew. A router has
            none at first.
        seed: of the routers.
        key: that the checkpoint must be signed with, and which signs the new one.
        settings: more fields of `GPTConfig`: experts_every, router, top_k, capacity_factor, ...

    Raises:
        InputError: `out` is not empty, or the settings change the model's output.
        CheckpointError: the checkpoint is damaged, was not written by `pipeloom train`, or has experts already.
    """
    saved = checkpoint.load(source, key=key)
    dense, mixture = _sizes(saved, experts, settings)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists and is not an empty directory. Choose another name.")
    blocks = [index for index in range(mixture.layers) if mixture.has_experts(index)]
    tensors: dict[str, Tensor] = {}
    largest = 0.0
    for name in saved.names:
        index, last = _place(name)
        if index not in blocks or last not in (_FIRST, _SECOND):
            tensors[name] = saved.tensor(name)
        elif last == _FIRST:
            layer = _experts_of(saved, mixture, index, seed)
            largest = max(largest, _difference(layer, saved, index))
            found = layer.state_dict(prefix=f"blocks.{index}.experts.")
            tensors |= {key: value.contiguous() for key, value in found.items()}
    options = {field.name: getattr(mixture, field.name) for field in fields(ModelSizes)}
    state = {**saved.state, "model": asdict(mixture), "config": {**saved.state["config"], "model": options}}
    path = checkpoint.save(
        out,
        saved.step,
        model=tensors,
        optimizer=_optimizer(saved, tensors, blocks, copy=optimizer == "copy"),
        state=state,
        layout={"ranks": 1, "upcycled": experts},
        ties=saved.manifest.ties,
        compute_type=saved.compute_type,
        key=key,
    )
    return Upcycled(path=path, step=saved.step, dense=dense, mixture=mixture, blocks=blocks, largest_difference=largest)


def _sizes(saved: checkpoint.Checkpoint, experts: int, settings: Mapping[str, Any]) -> tuple[GPTConfig, GPTConfig]:
    """The sizes of the dense model and of the mixture."""
    sizes = saved.state.get("model")
    if not isinstance(sizes, dict) or "sampler" not in saved.state:
        raise CheckpointError(f"{saved.path}: was not written by `pipeloom train`. Name one that was.")
    if sizes.get("pretrained") is not None:
        raise CheckpointError(
            f"{saved.path} is of {sizes['pretrained']}: a GPT alone becomes a mixture. Name a checkpoint of a GPT."
        )
    known = {field.name for field in fields(GPTConfig)}
    dense = GPTConfig(**{name: value for name, value in sizes.items() if name in known})
    if dense.experts:
        raise CheckpointError(f"{saved.path} has {dense.experts} experts already. Name a dense checkpoint.")
    router = settings.get("router", "topk")
    if router in _UNEQUAL:
        raise InputError(
            f"router={router}: {_UNEQUAL[router]}, so the mixture would not have the output of the dense model. "
            "Use topk, noisy-topk, glam or sigmoid."
        )
    if experts < 2:
        raise InputError(f"experts={experts}: a mixture has at least 2. Use 8, for example.")
    for name in ("shared_experts", "expert_width"):
        if settings.get(name):
            raise InputError(f"{name}={settings[name]}: an expert is a copy of the MLP, and all are routed. Remove it.")
    return dense, replace(dense, experts=experts, **settings)


def _place(name: str) -> tuple[int, str]:
    """The block of a tensor and its name there; block -1 for others."""
    first, _, rest = name.partition(".")
    index, _, last = rest.partition(".")
    return (int(index), last) if first == "blocks" and index.isdecimal() else (-1, name)


def _experts_of(saved: checkpoint.Checkpoint, mixture: GPTConfig, index: int, seed: int) -> Experts:
    """The experts of a block: copies of its MLP, and a router drawn by name."""
    up, down = (saved.tensor(f"blocks.{index}.{name}") for name in (_FIRST, _SECOND))
    with torch.device("meta"):
        layer = Experts(mixture.width, expert_width=mixture.width_of_expert, **mixture.expert_settings)
    layer.to_empty(device="cpu")
    prefix = f"blocks.{index}.experts.router."
    router: Any = layer.router
    router.canonical_names = {name: prefix + name for name, _ in router.named_parameters()}
    with torch.no_grad():
        init_parameters(router, seed=seed)
        for buffer in router.buffers():
            buffer.zero_()
        router.to(up.dtype)
    del router.canonical_names
    assert layer.up is not None
    layer.up.data = up.expand(mixture.experts, *up.shape).contiguous()
    layer.down.data = down.expand(mixture.experts, *down.shape).contiguous()
    return layer


@torch.no_grad()
def _difference(layer: Experts, saved: checkpoint.Checkpoint, index: int) -> float:
    """The largest difference between the outputs of the MLP and of its copies, in float64, relative to the largest.

    Raises:
        CheckpointError: they differ.
    """
    up, down = (saved.tensor(f"blocks.{index}.{name}").double() for name in (_FIRST, _SECOND))
    width, experts = up.shape[1], layer.num_experts
    x_BSW = torch.randn(1, _TOKENS, width, dtype=torch.float64, generator=torch.Generator().manual_seed(index))
    ample = {**layer.settings._asdict(), "capacity_factor": float(experts)}  # no token is over capacity
    double = Experts(width, expert_width=down.shape[1], **ample).double().eval()
    double.load_state_dict({name: value.double() for name, value in layer.state_dict().items()})
    wanted = F.linear(F.gelu(F.linear(x_BSW, up)), down)
    difference = float((double(x_BSW) - wanted).abs().max() / wanted.abs().max().clamp_min(1e-300))
    if not difference <= _TOLERANCE:
        raise CheckpointError(
            f"{saved.path}: the experts of block {index} differ from its MLP by {difference:.1e} of the largest "
            "output, as their gates do not sum to one. Use router topk."
        )
    return difference


def _optimizer(
    saved: checkpoint.Checkpoint, tensors: Mapping[str, Tensor], blocks: list[int], *, copy: bool
) -> OptimizerState | None:
    """The optimizer state of the mixture."""
    state = saved.optimizer_state()
    if state is None:
        return None
    groups = {name: group for group in state.groups for name in group["parameters"]}
    for index in blocks:
        for old, new in ((_FIRST, "experts.up"), (_SECOND, "experts.down")):
            name, expert = f"blocks.{index}.{old}", f"blocks.{index}.{new}"
            parameters, shape = groups[name]["parameters"], saved.tensor(name).shape
            parameters[parameters.index(name)] = expert
            if old == _FIRST:
                prefix = f"blocks.{index}.experts.router."
                routers = [key for key in tensors if key.startswith(prefix) and tensors[key].dim() > 1]
                parameters += routers
            state.tensors[expert] = {  # also factors of a matrix's statistics, [R, 1] and [1, C]
                key: value.expand(tensors[expert].shape[0], *value.shape).contiguous()
                if value.dim() == len(shape)
                else value
                for key, value in state.tensors.pop(name, {}).items()
            }
            if old == _FIRST and "momentum_buffer" in state.tensors[expert]:  # a fused update wants all or none
                state.tensors.update({key: {"momentum_buffer": torch.zeros_like(tensors[key])} for key in routers})
            state.values[expert] = state.values.pop(name, {})
    if not copy:
        state.tensors.clear()
        state.values.clear()
    return state
