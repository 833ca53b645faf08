"""A Hugging Face model trained through a pipeline, as it is.

    pip install 'pipeloom[huggingface]'
    python examples/train_huggingface.py                                       all ranks in this process
    torchrun --nproc-per-node 2 examples/train_huggingface.py --model gpt2     every rank a process

The weights are random and the text is small: nothing is downloaded. For a model of your own, put
``AutoModelForCausalLM.from_pretrained(...)`` in place of ``from_config(...)``.
"""

from __future__ import annotations

import argparse
import inspect
import os

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

import pipeloom as pl
from pipeloom.models.huggingface import causal_lm_loss, causal_lm_targets


def main() -> None:
    parser = argparse.ArgumentParser(description="A Hugging Face model trained through a pipeline.")
    parser.add_argument("--model", default="llama", choices=["llama", "mistral", "qwen2", "gpt2"])
    parser.add_argument("--schedule", default="1f1b", help="see `pipeloom schedules`")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of the pipeline; under torchrun, its processes")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--recompute", action="store_true", help="activation checkpointing of every block")
    options = parser.parse_args()

    num_ranks = options.ranks
    if "RANK" in os.environ:  # torchrun started this process as one of several
        dist.init_process_group("gloo")
        num_ranks = dist.get_world_size()

    sizes = {
        "vocab_size": 256,  # bytes
        "hidden_size": options.width,
        "num_hidden_layers": options.layers,
        "num_attention_heads": 4,
        "tie_word_embeddings": True,
    }
    if options.model != "gpt2":
        sizes |= {"intermediate_size": 3 * options.width, "num_key_value_heads": 2, "head_dim": options.width // 4}
    torch.manual_seed(0)  # every rank starts from the same weights
    config = AutoConfig.for_model(options.model, **sizes, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    model = AutoModelForCausalLM.from_config(config)
    if options.recompute:
        model.activation_checkpointing_enable()

    text = torch.frombuffer(bytearray(inspect.getsource(torch.nn.Module).encode()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(0)
    schedule = pl.schedules.build(options.schedule, num_ranks=num_ranks, num_microbatches=options.microbatches)
    with pl.Pipeline(model, schedule, loss_fn=causal_lm_loss) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
        for step in range(1, options.steps + 1):
            starts = torch.randint(0, len(text) - 64, (16, 1), generator=generator)
            input_ids = text[starts + torch.arange(64)]
            loss = pipe.step(input_ids, causal_lm_targets(input_ids))  # labels are the inputs, as in transformers
            pl.clip_grad_norm(pipe, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if pipe.needs_inputs and (step % 20 == 0 or step == options.steps):
                print(f"step {step}  loss {float(loss):.4f}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
