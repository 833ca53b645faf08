"""A small GPT trained on text through a pipeline, by the Python API.

    python examples/train_gpt.py                                     all ranks in this process
    torchrun --nproc-per-node 2 examples/train_gpt.py --text FILE    every rank a process, on your own text

`pipeloom train` does the same with evaluation, checkpoints, a report and more; this is how its parts fit together.
"""

from __future__ import annotations

import argparse
import inspect
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import pipeloom as pl
from pipeloom.models import GPT, GPTConfig, init_parameters, loss_fn


def main() -> None:
    parser = argparse.ArgumentParser(description="A small GPT trained on text through a pipeline.")
    parser.add_argument("--text", type=Path, help="a text file; left out: the source code of torch.nn.Module")
    parser.add_argument("--schedule", default="1f1b", help="see `pipeloom schedules`")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of the pipeline; under torchrun, its processes")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    options = parser.parse_args()

    num_ranks = options.ranks
    if "RANK" in os.environ:  # torchrun started this process as one of several
        dist.init_process_group("gloo")
        num_ranks = dist.get_world_size()

    text = options.text.read_bytes() if options.text else inspect.getsource(torch.nn.Module).encode()
    corpus = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    sizes = GPTConfig(layers=options.layers, width=options.width, heads=4, sequence_length=64, tie_embeddings=True)
    model = GPT(sizes)  # vocabulary 256: bytes; `model.pipeline_layers` says how it may be cut
    init_parameters(model, seed=0)  # values follow from seed and name, so every rank has the same
    schedule = pl.schedules.build(options.schedule, num_ranks=num_ranks, num_microbatches=options.microbatches)
    with pl.Pipeline(model, schedule, loss_fn=loss_fn) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
        generator = torch.Generator().manual_seed(0)
        for step in range(1, options.steps + 1):
            loss = pipe.step(*windows(corpus, 16, sizes.sequence_length, generator))
            pl.clip_grad_norm(pipe, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if pipe.needs_inputs and (step % 20 == 0 or step == options.steps):
                print(f"step {step}  loss {float(loss):.4f}", flush=True)
        validation = pipe.evaluate(*windows(corpus, 64, sizes.sequence_length, generator))
        if pipe.needs_inputs:
            print(f"loss of 64 other windows {float(validation):.4f}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


def windows(corpus: Tensor, count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random pieces of the text [count, length] and, as targets, the same one token on."""
    starts = torch.randint(0, len(corpus) - length, (count, 1), generator=generator)
    positions = starts + torch.arange(length)
    return corpus[positions], corpus[positions + 1]


if __name__ == "__main__":
    main()
