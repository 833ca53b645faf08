"""A schedule of one's own, as a function that returns the order of every rank.

    python examples/own_schedule.py                              train with it, all ranks in this process
    torchrun --nproc-per-node 2 examples/own_schedule.py         every rank a process
    pipeloom simulate examples/own_schedule.py:eager_one_f_one_b --ranks 4 --microbatches 8
    pipeloom train --schedule examples/own_schedule.py:eager_one_f_one_b

What the function returns is checked before anything runs: a schedule that would hang is refused in one line.
"""

from __future__ import annotations

import argparse
import os

import pipeloom as pl


def eager_one_f_one_b(*, num_ranks: int, num_microbatches: int) -> list[str]:
    """1F1B with a warm-up of 2 (p - 1 - d) forwards on rank d, so that slow links cost less; one line a rank."""
    lines = []
    for d in range(num_ranks):
        warmup = min(2 * (num_ranks - 1 - d), num_microbatches)
        order = [f"{d}F{b}" for b in range(warmup)]
        for b in range(num_microbatches):
            if warmup + b < num_microbatches:
                order.append(f"{d}F{warmup + b}")
            order.append(f"{d}B{b}")
        lines.append(" ".join(order))
    return lines


def main() -> None:
    import torch  # not above: `pipeloom simulate` reads this file too, and needs no torch
    import torch.distributed as dist
    from torch import nn

    parser = argparse.ArgumentParser(description="Train with a schedule of one's own.")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of the pipeline; under torchrun, its processes")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()

    num_ranks = options.ranks
    if "RANK" in os.environ:  # torchrun started this process as one of several
        dist.init_process_group("gloo")
        num_ranks = dist.get_world_size()

    schedule = pl.schedules.from_function(eager_one_f_one_b, num_ranks=num_ranks, num_microbatches=options.microbatches)
    torch.manual_seed(0)  # every rank builds the same model and keeps its own stages
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2 * num_ranks)])
    with pl.Pipeline(model, schedule, loss_fn=nn.functional.mse_loss) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        for step in range(1, options.steps + 1):
            inputs = torch.rand(32, 16)
            loss = pipe.step(inputs, inputs.flip(1))
            optimizer.step()
            optimizer.zero_grad()
            if pipe.needs_inputs and step in (1, options.steps):
                print(f"step {step}  loss {float(loss):.6f}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
