"""The overhead of a stage: CPU time of forward and backward beside the plain module, in one process.

Traced stages run a graph that torch.export made, planned stages the forward of a model of transformers. Compared first:
outputs and gradients, bit by bit.
"""

from __future__ import annotations

import copy
import importlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from benchmarks.any_model.pipelines import SIZES, make_gpt
from benchmarks.common.report import Parts, table
from benchmarks.common.statistics import Spread, ratio, spread
from torch import Tensor, nn
from torch.nn import functional as F

from pipeloom.processes.host_memory import keep_freed_memory
from pipeloom.split import split
from pipeloom.split.planned.stage import PlannedStage

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


class Around(nn.Module):
    """Calls a module: the least that stands between a caller and a module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inside = (module,)

    def forward(self, *args: Any, **settings: Any) -> Any:
        return self.inside[0](*args, **settings)


def wrapped(module: nn.Module, parts: Sequence[str]) -> nn.Module:
    """A copy of a module with an `Around` around it and around each of its `parts`."""
    other = copy.deepcopy(module)
    for name in parts:
        other.set_submodule(name, Around(other.get_submodule(name)))
    return Around(other)


class Times(NamedTuple):
    """CPU seconds of a forward and backward, round by round."""

    module: list[float]
    copy: list[float]
    wrapped: list[float]
    stage: list[float]


def measure(num_rounds: int) -> dict[str, Times]:
    """For each model, the times of the module, of a copy of it, of one with modules around its parts, and of its stage.

    What a copy takes longer or shorter is where its memory lies and what the machine does meanwhile. A stage has to
    come between the model and its parts; what modules around them take is the least that it can take.
    """
    keep_freed_memory()
    found = {}
    for name, case in cases().items():
        plain, other, kept = case.module, copy.deepcopy(case.module), copy.deepcopy(case.module)
        stage = split(kept, 1, **case.options).modules[0]  # kept, as in training: a stage follows its attributes
        least = wrapped(case.module, stage.names if isinstance(stage, PlannedStage) else ())
        runs = ((plain, case.call), (other, case.call), (least, case.call), (stage, {}))
        outputs = [_step(run, case, call) for run, call in runs]
        own = dict(stage.named_parameters())
        same = all(torch.equal(own[key].grad, value.grad) for key, value in plain.named_parameters())
        if not same or not torch.equal(outputs[0], outputs[-1]):
            raise SystemExit(f"{name}: the stage has other outputs or gradients than the module.")
        times = Times([], [], [], [])
        for number in range(num_rounds + 2):
            steps: tuple[list[float], ...] = ([], [], [], [])
            for turn in range(STEPS):
                for which in range(len(runs)):
                    which = (which + number + turn) % len(runs)
                    begun = time.process_time()
                    _step(runs[which][0], case, runs[which][1])
                    steps[which].append(time.process_time() - begun)
            for taken, each in zip(times, steps, strict=True):
                taken.append(min(each))
        found[name] = Times(*(taken[2:] for taken in times))
    return found


def tables(results: dict[str, Times]) -> Parts:
    """One row per model."""
    rows = [
        (
            name,
            spread(times.module).show("{:.2f}", 1e3),
            *(ratio(*pair).show("{:.3f}") for pair in _pairs(times).values()),
        )
        for name, times in results.items()
    ]
    return [
        f"CPU time of forward and backward, {torch.get_num_threads()} thread: a stage of the whole model beside the "
        "plain module, a copy of it, and a copy with a module around each part, which is the least that comes between "
        f"a model and its parts; the fastest of {STEPS} steps per round, median (quartiles) of rounds. "
        "Traced stages run a graph of torch.export, planned stages the forward of a model of transformers.",
        table(["model", "module, ms", *_pairs(Times([], [], [], []))], rows),
    ]


def _pairs(times: Times) -> dict[str, tuple[list[float], list[float]]]:
    return {
        "stage / module": (times.stage, times.module),
        "stage / copy": (times.stage, times.copy),
        "stage / wrapped copy": (times.stage, times.wrapped),
        "copy / module": (times.copy, times.module),
    }


def headlines(results: dict[str, Times]) -> dict[str, Spread]:
    """CPU time of a stage over that of the module, and how far a copy of the module is from it."""
    return {f"{what}: {name}": ratio(*pair) for name, times in results.items() for what, pair in _pairs(times).items()}
