"""A script for transformers' Trainer that trains through a pipeline: another class, and a schedule.

    pip install 'pipeloom[trainer]'
    python examples/train_transformers_trainer.py                                  two ranks in this process
    torchrun --nproc-per-node 2 examples/train_transformers_trainer.py             every rank a process

The weights are random and the text is small: nothing is downloaded.
"""

from __future__ import annotations

import argparse
import inspect
import os
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

import pipeloom as pl
from pipeloom.integrations.transformers import PipelineTrainer


class Printed(TrainerCallback):
    """Prints what Trainer logs."""

    def on_log(self, args, state, control, logs=None, **others):
        for name in ("loss", "eval_loss"):
            if state.is_world_process_zero and name in (logs or {}):
                print(f"step {state.global_step}  {name.replace('_', ' ')} {logs[name]:.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="transformers' Trainer on a pipeline.")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--schedule", default="1f1b", help="see `pipeloom schedules`")
    options = parser.parse_args()

    text = list(inspect.getsource(torch.nn.Module).encode())
    windows = [text[start : start + 32] for start in range(0, 8192, 32)]
    data = [{"input_ids": torch.tensor(window), "labels": torch.tensor(window)} for window in windows]

    torch.manual_seed(0)  # every process starts from the same weights
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_key_value_heads=4, **sizes))

    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,  # the micro-batches of the pipeline
        max_steps=options.steps,
        learning_rate=3e-3,
        warmup_steps=2,
        weight_decay=0.1,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=options.steps,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    ranks = int(os.environ.get("WORLD_SIZE", "2"))
    trainer = PipelineTrainer(
        model,
        arguments,
        train_dataset=data[:-16],
        eval_dataset=data[-16:],
        callbacks=[Printed()],
        schedule=pl.schedules.build(options.schedule, num_ranks=ranks, num_microbatches=4),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()


if __name__ == "__main__":
    main()
