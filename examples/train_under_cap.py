"""A training state that does not fit under a cap of memory, until data-parallel replicas shard it.

    torchrun --nproc-per-node 4 examples/train_under_cap.py                 zero3: trains
    torchrun --nproc-per-node 4 examples/train_under_cap.py --data ddp      unsharded: out of memory

Two replicas of a pipeline of two ranks train in bfloat16 with float32 main parameters and AdamW: 16 bytes per parameter
of a stage, with `ddp` in every process, with `zero3` sharded over two.
The cap is an operating-system limit on data that a process allocates (RLIMIT_DATA), in addition to what it has before
the model exists.
"""

from __future__ import annotations

import argparse
import resource
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import pipeloom as pl

NUM_RANKS, NUM_LAYERS, MEGABYTE = 2, 12, 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description="A training state that fits under a cap of memory with ZeRO-3 alone.")
    parser.add_argument("--data", default="zero3", help="ddp, zero1, zero2 or zero3")
    parser.add_argument("--cap", type=int, default=600, help="megabytes a process")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    mesh = pl.Mesh(pp=NUM_RANKS, dp=-1)
    limit_memory(options.cap)
    rank = mesh.coordinate("pp")
    torch.manual_seed(rank)
    layers = []
    for index in range(NUM_LAYERS):
        # The whole model in every process might be too much: of the other rank's layers only the shapes are needed.
        is_own = index * NUM_RANKS // NUM_LAYERS == rank
        with torch.device("cpu" if is_own else "meta"):
            layers.append(layer(options.width))
    num_parameters = sum(p.numel() for p in nn.ModuleList(layers).parameters()) // NUM_RANKS
    if mesh.coordinate("dp") == 0:
        state = 16 * num_parameters / MEGABYTE
        print(f"stage {rank}: {state:.0f} MB of training state, cap {options.cap} MB a process", flush=True)
    schedule = pl.schedules.build("1f1b", num_ranks=NUM_RANKS, num_microbatches=4)
    data = pl.DataParallel(options.data, granularity="microbatch" if options.data in ("zero2", "zero3") else None)
    model = nn.Sequential(*layers)
    formats = pl.Precision("bf16", gradients="same")
    with pl.Pipeline(model, schedule, loss_fn=nn.functional.mse_loss, mesh=mesh, data=data, precision=formats) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-4)
        generator = torch.Generator().manual_seed(mesh.coordinate("dp"))
        for step in range(1, options.steps + 1):
            inputs = torch.randn(16, options.width, generator=generator)
            loss = pipe.step(inputs, inputs.roll(1, dims=1))
            pl.update_parameters(optimizer)  # optimizer.step() for gradients in another format than the masters
            optimizer.zero_grad()
            if dist.get_rank() == 0:
                print(f"step {step}  loss {float(loss):.4f}", flush=True)
    dist.destroy_process_group()


def layer(width: int) -> nn.Sequential:
    """A perceptron of one hidden layer."""
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def limit_memory(megabytes: int) -> None:
    """From here on this process may allocate so much more than it has."""
    status = Path("/proc/self/status").read_text()
    (has,) = (int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (has + megabytes * MEGABYTE,) * 2)


if __name__ == "__main__":
    main()
