"""A tiny Llama in a Hugging Face directory with a byte tokenizer and a chat template, and JSON lines to train it on."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from .train_runs import WORDS

TURN = "<|{{ m.role }}|>{{ m.content }}<|end|>"
ASKS = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
TEMPLATE = f"{{% for m in messages %}}{TURN}{{% endfor %}}{ASKS}"
ANSWER = "{% generation %}{{ m.content }}<|end|>{% endgeneration %}"
MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}"
    + ANSWER
    + "{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}"
    + ASKS
)


def byte_tokenizer(template: str | None = TEMPLATE) -> Any:
    """A token per byte, and five special ones."""
    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=["<|user|>", "<|assistant|>", "<|end|>"],
    )
    tokenizer.chat_template = template
    return tokenizer


def save_llama(directory: Path, **changes: Any) -> None:
    """Write a random Llama of four layers and its tokenizer."""
    tokenizer = byte_tokenizer()
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer), "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**{**sizes, **changes})).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def records(number: int) -> list[dict[str, Any]]:
    """Texts, prompts with completions, and conversations, in turn."""
    draw = random.Random(number)

    def words(most: int) -> str:
        return " ".join(draw.choice(WORDS) for _ in range(draw.randint(1, most)))

    def turn(role: str, most: int) -> dict[str, str]:
        return {"role": role, "content": words(most)}

    made: list[dict[str, Any]] = []
    for index in range(number):
        if index % 3 == 0:
            made.append({"text": words(9)})
        elif index % 3 == 1:
            made.append({"prompt": words(4) + " ", "completion": words(4)})
        else:
            made.append({"messages": [turn(role, 2) for role in ("user", "assistant", "user", "assistant")]})
    return made


def write_lines(file: Path, lines: list[Any]) -> Path:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file
