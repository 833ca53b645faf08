"""ZeRO-3 under a pipeline: every process keeps its piece of its stage's parameters, gradients and optimizer states.

    torchrun --nproc-per-node 4 examples/train_zero.py                       two replicas of a pipeline of two ranks
    torchrun --nproc-per-node 4 examples/train_zero.py --output runs/zero    goes on from its last checkpoint there

"ddp", "zero1" and "zero2" keep more and send less; the losses are the same. A checkpoint is of the whole model: it goes
on with any of them, and with another data-parallel degree.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import pipeloom as pl
from pipeloom.train import checkpoint


class Classifier(nn.Module):
    """Which of two interleaved spirals is a point on?"""

    pipeline_layers = ("lift", "blocks.*", "head")  # in this order; the pipeline is cut between them

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.lift = nn.Linear(2, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.SiLU(), nn.Linear(width, width)) for _ in range(depth))
        self.head = nn.Sequential(nn.SiLU(), nn.Linear(width, 2))


def spirals(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Points [count, 2] and the spiral [count] that each is on."""
    radius = torch.rand(count, generator=generator).sqrt()
    spiral = torch.randint(2, (count,), generator=generator)
    angle = 2 * torch.pi * radius + torch.pi * spiral
    return radius[:, None] * torch.stack([angle.cos(), angle.sin()], dim=1), spiral


def main() -> None:
    parser = argparse.ArgumentParser(description="ZeRO-3 under a pipeline.")
    parser.add_argument("--data", default="zero3", help="ddp, parameter-server, zero1, zero2 or zero3")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--output", type=Path, help="where checkpoints are")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    mesh = pl.Mesh(pp=2, dp=-1)  # two ranks per pipeline; dp uses all remaining processes
    torch.manual_seed(0)  # every process builds the same model and keeps its part
    schedule = pl.schedules.build("1f1b", num_ranks=2, num_microbatches=4)
    model, loss_fn = Classifier(width=64, depth=6), nn.functional.cross_entropy
    with pl.Pipeline(model, schedule, loss_fn=loss_fn, mesh=mesh, data=options.data) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
        names = {parameter: name for name, parameter in pipe.named_parameters()}
        first = 1
        if options.output and checkpoint.list_checkpoints(options.output):
            saved = checkpoint.load(options.output)
            saved.load_model(pipe.state.main_state(), pipe.state.ranges)
            saved.load_optimizer(optimizer, names, pipe.state.ranges)
            pipe.state.refresh()
            first = saved.step + 1
        for step in range(first, options.steps + 1):
            inputs, targets = spirals(256, torch.Generator().manual_seed(step))
            replica, replicas = mesh.coordinate("dp"), mesh.degree("dp")  # each replica takes its part of the batch
            loss = pipe.step(inputs.chunk(replicas)[replica], targets.chunk(replicas)[replica])  # mean over the batch
            pl.clip_grad_norm(pipe, 1.0)  # the norm of all parameters, over ranks and replicas
            optimizer.step()
            optimizer.zero_grad()
            if dist.get_rank() == 0 and (step % 50 == 0 or step == options.steps):
                print(f"step {step}  loss {float(loss):.4f}", flush=True)
        if options.output:
            checkpoint.save(
                options.output,
                options.steps,
                model=pipe.state.main_state(),
                ranges=pipe.state.ranges,
                optimizer=checkpoint.optimizer_state(optimizer, names),
                exchange=checkpoint.DistributedExchange(),
            )
        held = sum(p.numel() for p in pipe.parameters())
        whole = sum(p.numel() for p in Classifier(width=64, depth=6).parameters())
        print(f"process {dist.get_rank()} updates {held} of {whole} parameters", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
