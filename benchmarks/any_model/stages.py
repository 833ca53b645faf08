"""The overhead of a stage: CPU time of forward and backward beside the plain module, in one process.

Traced stages run a graph that torch.export made, planned stages the forward of a model of transformers. Compared first:
outputs and gradients, bit by bit.
"""

from __future__ import annotations

import copy
import importlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from benchmarks.any_model.pipelines import SIZES, make_gpt
from benchmarks.common.report import Parts, table
from benchmarks.common.statistics import Spread, ratio, spread
from torch import Tensor, nn
from torch.nn import functional as F

from pipeloom.split import split

STEPS = 4  # per system and round


class Case(NamedTuple):
    """A module, its only input, what it returns for its output, and how it becomes a stage."""

    module: nn.Module
    inputs: Tensor
    output: Callable[[Any], Tensor]
    options: dict[str, Any]
    call: dict[str, Any]


class ResidualNet(nn.Module):
    """Convolutions with batch norm and residual connections."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.layers = nn.ModuleList([nn.Conv2d(width, width, 3, padding=1) for _ in range(6)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(width) for _ in range(6)])
        self.head = nn.Linear(width, 256)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + F.relu(norm(layer(x)))
        return self.head(x.mean((2, 3)))


def cases() -> dict[str, Case]:
    """Traced and planned models of several sizes."""
    generator = torch.Generator().manual_seed(2)
    found: dict[str, Case] = {}
    for width, length, samples in SIZES:
        tokens = torch.randint(0, 256, (samples, length), generator=generator)
        name = f"width {width}, {samples} x {length} tokens"
        model: nn.Module = make_gpt(width, length)
        found[f"traced: GPT, {name}"] = Case(model, tokens, lambda y: y, {"example": tokens}, {})
        for family, planned in _of_transformers(width, length).items():
            found[f"planned: {family}, {name}"] = Case(planned, tokens, lambda y: y.logits, {}, {"use_cache": False})
    images = torch.randn(8, 3, 16, 16, generator=generator)
    torch.manual_seed(3)
    found["traced: residual net, 8 images"] = Case(ResidualNet(32), images, lambda y: y, {"example": images}, {})
    return found


def _of_transformers(width: int, length: int) -> dict[str, nn.Module]:
    """Models of four layers."""
    transformers = importlib.import_module("transformers")
    sizes = {
        "vocab_size": 256,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": length,
    }
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    torch.manual_seed(1)
    configs = {"Llama": transformers.LlamaConfig(**sizes), "GPT-2": transformers.GPT2Config(**sizes, **dropout)}
    return {name: transformers.AutoModelForCausalLM.from_config(config) for name, config in configs.items()}


def _step(run: Any, case: Case, call: dict[str, Any]) -> Tensor:
    output = case.output(run(case.inputs, **call))
    F.cross_entropy(output.flatten(0, -2), torch.zeros(output.shape[:-1].numel(), dtype=torch.long)).backward()
    return output.detach()


def measure(num_rounds: int) -> dict[str, tuple[list[float], list[float]]]:
    """For each model, CPU seconds of a forward and backward of the module and of its stage, round by round."""
    found = {}
    for name, case in cases().items():
        plain, kept = case.module, copy.deepcopy(case.module)  # kept, as in training: a stage follows its attributes
        stage = split(kept, 1, **case.options).modules[0]
        runs = ((plain, case.call), (stage, {}))
        outputs = [_step(run, case, call) for run, call in runs]
        own = dict(stage.named_parameters())
        same = all(torch.equal(own[key].grad, value.grad) for key, value in plain.named_parameters())
        if not same or not torch.equal(*outputs):
            raise SystemExit(f"{name}: the stage has other outputs or gradients than the module.")
        times: tuple[list[float], list[float]] = ([], [])
        for number in range(num_rounds + 2):
            for which in (0, 1) if number % 2 else (1, 0):
                run, call = runs[which]
                steps = []
                for _ in range(STEPS):
                    begun = time.process_time()
                    _step(run, case, call)
                    steps.append(time.process_time() - begun)
                times[which].append(min(steps))
        found[name] = times[0][2:], times[1][2:]
    return found


def tables(results: dict[str, tuple[list[float], list[float]]]) -> Parts:
    """One row per model."""
    rows = [
        (name, *(spread(times).show("{:.2f}", 1e3) for times in both), ratio(both[1], both[0]).show("{:.3f}"))
        for name, both in results.items()
    ]
    return [
        f"CPU time of forward and backward in milliseconds, {torch.get_num_threads()} thread: a stage of the whole "
        f"model beside the plain module; the fastest of {STEPS} steps per round, median (quartiles) over rounds. "
        "Traced stages run a graph of torch.export, planned stages the forward of a model of transformers.",
        table(["model", "module", "stage", "stage / module"], rows),
    ]


def headlines(results: dict[str, tuple[list[float], list[float]]]) -> dict[str, Spread]:
    """CPU time of a stage over that of the module."""
    return {f"stage / module: {name}": ratio(both[1], both[0]) for name, both in results.items()}
