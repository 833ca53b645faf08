"""Tiny models and data for transformers' Trainer, made in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    TrainingArguments,
)

import pipeloom as pl

VOCABULARY = 64
pl.register_layout(BertModel, ["embeddings", "encoder.layer.*", "pooler"])


def llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, **{**sizes, **changes}))


def bert(**changes: Any) -> BertForSequenceClassification:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(vocab_size=VOCABULARY, num_labels=3, max_position_embeddings=32, **sizes, **no_dropout)
    for name, value in changes.items():
        setattr(config, name, value)
    return BertForSequenceClassification(config)


def sequences(number: int = 30) -> list[dict[str, Any]]:
    """Samples of 4 to 11 tokens, with a class."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(4, 12, (number,), generator=generator).tolist()
    return [
        {"input_ids": torch.randint(3, VOCABULARY, (length,), generator=generator), "label": length % 3}
        for length in lengths
    ]


def padded(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Token sequences, padded to the longest; labels of padding are -100."""
    longest = max(len(sample["input_ids"]) for sample in samples)
    batch = {
        "input_ids": torch.zeros(len(samples), longest, dtype=torch.long),
        "attention_mask": torch.zeros(len(samples), longest, dtype=torch.long),
        "labels": torch.full((len(samples), longest), -100),
    }
    for row, sample in enumerate(samples):
        length = len(sample["input_ids"])
        batch["input_ids"][row, :length] = batch["labels"][row, :length] = sample["input_ids"]
        batch["attention_mask"][row, :length] = 1
    return batch


def classified(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Padded sequences with a class each."""
    return {**padded(samples), "labels": torch.tensor([sample["label"] for sample in samples])}


def arguments(directory: Path, **changes: Any) -> TrainingArguments:
    """Two epochs with weight decay, warm-up, accumulation and a last update of fewer batches."""
    options: dict[str, Any] = {
        "output_dir": str(directory),
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 8,
        "gradient_accumulation_steps": 3,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "warmup_steps": 2,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(**{**options, **changes})


def history(trainer: Any) -> list[dict[str, Any]]:
    """What a Trainer logged, without times."""
    times = ("runtime", "per_second", "preparation_time")
    return [
        {name: value for name, value in row.items() if not name.endswith(times) and name != "total_flos"}
        for row in trainer.state.log_history
    ]
