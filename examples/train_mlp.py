"""A plain nn.Sequential trained through a pipeline.

    python examples/train_mlp.py                              all ranks in this process, one after another
    torchrun --nproc-per-node 2 examples/train_mlp.py         every rank a process

Both print the same losses.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

import pipeloom as pl


def main() -> None:
    parser = argparse.ArgumentParser(description="A plain nn.Sequential trained through a pipeline.")
    parser.add_argument("--schedule", default="1f1b", help="see `pipeloom schedules`")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of the pipeline; under torchrun, its processes")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=64)
    options = parser.parse_args()

    num_ranks = options.ranks
    if "RANK" in os.environ:  # torchrun started this process as one of several
        dist.init_process_group("gloo")
        num_ranks = dist.get_world_size()

    torch.manual_seed(0)  # every rank builds the same model and keeps its own stages
    hidden = [nn.Sequential(nn.Linear(options.width, options.width), nn.Tanh()) for _ in range(6)]
    model = nn.Sequential(nn.Linear(2, options.width), *hidden, nn.Linear(options.width, 1))

    schedule = pl.schedules.build(options.schedule, num_ranks=num_ranks, num_microbatches=options.microbatches)
    with pl.Pipeline(model, schedule, loss_fn=nn.functional.mse_loss) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=2e-3)
        for step in range(1, options.steps + 1):
            inputs = torch.rand(256, 2) * 4 - 2
            targets = (inputs[:, :1] * inputs[:, 1:]).sin()
            loss = pipe.step(inputs, targets)  # the mean over the batch, on every rank
            pl.clip_grad_norm(pipe, 1.0)  # the norm over all stages
            optimizer.step()
            optimizer.zero_grad()
            if pipe.needs_inputs and (step % 100 == 0 or step == options.steps):
                print(f"step {step}  loss {float(loss):.6f}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
