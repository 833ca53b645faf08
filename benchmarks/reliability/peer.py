"""A training script as users of torch write it: torchrun, pipelining's 1F1B, torch.distributed.checkpoint. No pipeloom.

torchrun starts one process per pipeline stage. Every `--save_steps` steps, the script saves model, optimizer and random
generators into a fresh directory. It starts from the newest complete directory, which is one with ``.metadata``.
"""

from __future__ import annotations

import argparse
import json
from collections import OrderedDict
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F

VOCABULARY = 256  # bytes
OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        B, S, D = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(B, S, 3, self.heads, D // self.heads).unbind(2)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        x = x + F.dropout(self.project(y.transpose(1, 2).reshape(B, S, D)), self.dropout, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm_2(x)))), self.dropout, self.training)


def build(rank: int, size: int, options: argparse.Namespace) -> nn.Module:
    """The layers of this rank's stage, under their names in the whole model."""
    torch.manual_seed(0)
    layers: list[tuple[str, nn.Module]] = [("embedding", nn.Embedding(VOCABULARY, options.width))]
    for index in range(options.layers):
        layers.append((f"block_{index}", Block(options.width, options.heads, options.dropout)))
    layers.append(("head", nn.Linear(options.width, VOCABULARY, bias=False)))
    ends = [0, *(1 + options.layers * r // size for r in range(1, size)), len(layers)]
    torch.manual_seed(1 + rank)  # dropout differs between stages
    return nn.Sequential(OrderedDict(layers[ends[rank] : ends[rank + 1]]))


def batch(text: Tensor, step: int, options: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a step; the same in every run."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - options.sequence_length - 1, (options.batch,), generator=generator)
    rows = torch.stack([text[start : start + options.sequence_length + 1] for start in starts.tolist()]).long()
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> dict[str, Any]:
    """What a checkpoint holds."""
    parameters, optimizer_state = get_state_dict(model, optimizer, options=OPTIONS)
    random = {f"random_{rank}": torch.get_rng_state()}
    return {"model": parameters, "optimizer": optimizer_state, "step": step, **random}


def resume(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, output_dir: Path) -> int:
    """Load the newest complete checkpoint; returns its step, or 0."""
    complete = [int(path.parent.name.removeprefix("step-")) for path in output_dir.glob("step-*/.metadata")]
    if not complete:
        return 0
    state = state_of(model, optimizer, rank, 0)
    dcp.load(state, checkpoint_id=output_dir / f"step-{max(complete)}")
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=OPTIONS
    )
    torch.set_rng_state(state[f"random_{rank}"])
    return int(state["step"])


def train(options: argparse.Namespace) -> None:
    """Train to the last step."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = build(rank, size, options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    stage = PipelineStage(model, rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(
        stage, options.microbatches, loss_fn=lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten())
    )
    text = torch.frombuffer(bytearray(options.text.read_bytes()), dtype=torch.uint8)
    group = dist.new_group(backend="gloo") if options.background else None
    saving: Future[Any] | None = None
    start = resume(model, optimizer, rank, options.output_dir)
    for step in range(start + 1, options.steps + 1):
        inputs, targets = batch(text, step, options)
        losses: list[Tensor] = []
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets, losses=losses)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if losses:  # on the last rank
            row = {"step": step, "loss": torch.stack(losses).mean().item()}
            with (options.output_dir / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"step {step}  loss {row['loss']:.4f}", flush=True)
        if step % options.save_steps == 0 or step == options.steps:
            state, place = state_of(model, optimizer, rank, step), options.output_dir / f"step-{step}"
            if options.background:
                if saving is not None:
                    saving.result()
                saving = dcp.async_save(state, checkpoint_id=place, process_group=group)
            else:
                dcp.save(state, checkpoint_id=place)
    if saving is not None:
        saving.result()


def main() -> None:
    """Read the options, train, and leave the process group."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    for name in ("layers", "width", "heads", "sequence_length", "batch", "microbatches", "steps", "save_steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--background", action="store_true", help="async_save")
    options = parser.parse_args()
    options.output_dir.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo")
    train(options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
