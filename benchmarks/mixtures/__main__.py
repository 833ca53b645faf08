"""Validation losses of a dense GPT and of mixtures of equal active arithmetic, for every router."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from benchmarks.common.report import Parts, environment, markdown, save, table
from benchmarks.common.statistics import Cell, Spread

import pipeloom as pl
from pipeloom.common.atomic_file import write_whole
from pipeloom.data.corpus import Corpus, prepare_corpus
from pipeloom.data.sampler import Sampler
from pipeloom.models import GPT, GPTConfig, init_parameters, loss_fn
from pipeloom.train.config.sections import OptimizerConfig
from pipeloom.train.optimizers import learning_rate, make_optimizer
from pipeloom.version import __version__

DENSE = GPTConfig(layers=4, width=64, heads=4, sequence_length=64)
EXPERTS = 8
# Experts per token times their width is the MLP's width, so a token has the arithmetic of the dense model.
HALF = {"expert_width": DENSE.mlp_ratio * DENSE.width // 2}
SYSTEMS: dict[str, dict[str, Any]] = {
    "dense": {},
    "topk": HALF,
    "switch": {},
    "gshard": HALF,
    "glam": HALF,
    "noisy-topk": HALF,
    "sigmoid": HALF,
    "expert-choice": HALF,
}
SETTINGS = ("steps", "batch", "experts_every", "validation")
LAST = 50  # steps whose loads are averaged


def config_of(name: str, every: int) -> GPTConfig:
    if name == "dense":
        return DENSE
    settings = {"experts": EXPERTS, "experts_every": every, "router": name}
    return replace(DENSE, **settings, **SYSTEMS[name])


def active_parameters(config: GPTConfig) -> int:
    """Parameters that a token multiplies or looks up."""
    if not config.experts:
        return config.num_parameters
    top_k = 1 if config.router == "switch" else config.top_k or 2
    blocks = config.layers // config.experts_every
    idle = blocks * (config.experts - top_k) * 2 * config.width_of_expert * config.width
    return config.num_parameters - idle


def train(name: str, seed: int, options: argparse.Namespace, corpus: Corpus) -> dict[str, Any]:
    """One run: losses of all steps, the validation loss at the end, and what routers report at the end."""
    config = config_of(name, options.experts_every)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # expert-choice sees the future, which the table says
        model = GPT(config)
    init_parameters(model, seed=seed)
    torch.manual_seed(seed)
    schedule = pl.schedules.one_f_one_b(num_ranks=1, num_microbatches=1)
    sampler = Sampler(corpus.num_windows(config.sequence_length), seed)
    losses, auxiliary, observed = [], [], []
    with pl.Pipeline(model, schedule, loss_fn=loss_fn, transport="loopback") as pipe:
        settings = OptimizerConfig()
        optimizer = make_optimizer(pipe.named_parameters(), settings)
        began = time.process_time()
        for step in range(options.steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, options.steps, settings)
            windows = sampler.batch(step * options.batch, options.batch)
            losses.append(float(pipe.step(*corpus.windows(windows, config.sequence_length))))
            pl.clip_grad_norm(pipe, settings.clip_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            found = pipe.auxiliary_losses()
            auxiliary.append(sum(loss.weighted for layer in found.values() for loss in layer.values()))
            if step >= options.steps - LAST:
                observed.append({layer: dict(values) for layer, values in pipe.observations().items()})
        seconds = time.process_time() - began
        indices = range(options.validation)
        pairs = corpus.windows(list(indices), config.sequence_length, "validation")
        validation = float(pipe.evaluate(*pairs))
    return {
        "losses": losses,
        "auxiliary": auxiliary,
        "validation": validation,
        "cpu_seconds_per_step": seconds / options.steps,
        **_loads(observed),
    }


def _loads(observed: list[dict[str, dict[str, torch.Tensor]]]) -> dict[str, float]:
    """Over the last steps and all layers: load of the busiest expert over the mean, fraction dropped, entropy."""
    rows = [layer for step in observed for layer in step.values()]
    if not rows:
        return {}
    return {
        "busiest": statistics.fmean(float(row["chosen"].max() / row["chosen"].mean()) for row in rows),
        "dropped": statistics.fmean(float(row["dropped"] / row["chosen"].sum()) for row in rows),
        "entropy": statistics.fmean(float(row["entropy"] / row["tokens"]) for row in rows),
    }


def measure(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """A run per system and seed. Runs that `options.state` has are not repeated."""
    settings = {name: getattr(options, name) for name in SETTINGS}
    found: dict[str, dict[str, Any]] = {}
    if options.state.exists():
        state = json.loads(options.state.read_text(encoding="utf-8"))
        if state["settings"] != settings:
            raise SystemExit(
                f"{options.state} has runs with {state['settings']}, not {settings}. Name another --state."
            )
        found = state["runs"]
    with tempfile.TemporaryDirectory(prefix="pipeloom-benchmark-") as scratch:
        corpus = prepare_corpus(None, None, Path(scratch))
        for seed in range(options.seeds):
            for name in options.systems:
                key = f"{name}, seed {seed}"
                if key not in found:
                    found[key] = train(name, seed, options, corpus)
                    write_whole(options.state, json.dumps({"settings": settings, "runs": found}))
                print(f"{key}: validation loss {found[key]['validation']:.4f}", flush=True)
    return {name: {str(s): found[f"{name}, seed {s}"] for s in range(options.seeds)} for name in options.systems}


def _range(values: list[float]) -> Cell:
    """Mean, and least and largest."""
    found = Spread(statistics.fmean(values), min(values), max(values))
    middle, low, high = map("{:.3f}".format, found)
    return Cell(f"{middle} ({low} to {high})", found)


def tables(results: dict[str, dict[str, Any]], options: argparse.Namespace) -> Parts:
    header = (
        *("router", "parameters", "of them per token", "training loss", "validation loss", "minus dense, same seed"),
        *("busiest expert / mean", "dropped", "entropy, nats"),
    )
    rows = []
    for name, runs in results.items():
        config, each = config_of(name, options.experts_every), list(runs.values())
        training = [statistics.fmean(run["losses"][-LAST:]) for run in each]
        validation = [run["validation"] for run in each]
        less: object = ""
        if name != "dense" and "dense" in results:
            less = _range([run["validation"] - results["dense"][seed]["validation"] for seed, run in runs.items()])
        seen: list[object] = ["", "", ""]
        if "busiest" in each[0]:
            busiest, dropped, entropy = ([run[key] for run in each] for key in ("busiest", "dropped", "entropy"))
            seen = [f"{statistics.fmean(busiest):.2f}", f"{statistics.fmean(dropped):.1%}"]
            seen.append(f"{statistics.fmean(entropy):.2f}")
        sizes = (f"{config.num_parameters:,}", f"{active_parameters(config):,}")
        rows.append((name, *sizes, _range(training), _range(validation), less, *seen))
    return [
        f"Mean (least to largest) of {options.seeds} seeds after {options.steps} steps of {options.batch} samples; the "
        f"training loss is the mean of the last {LAST} steps.",
        table(header, rows),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mixtures", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=16, help="samples per step")
    parser.add_argument("--experts-every", type=int, default=2)
    parser.add_argument("--validation", type=int, default=512, help="validation samples")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--state", type=Path, default=Path("runs/mixtures.json"), help="finished runs, to go on from")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / f"{__version__}.json")
    options = parser.parse_args()
    options.state.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    machine = environment()
    results = measure(options)
    parts = tables(results, options)
    print(markdown(parts))
    settings = {name: getattr(options, name) for name in ("seeds", *SETTINGS)}
    save(options.output, settings, machine, results, parts)


if __name__ == "__main__":
    main()
