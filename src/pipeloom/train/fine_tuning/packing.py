"""Whether a model keeps packed documents apart: found by running it, since implementations of attention differ."""

from typing import Any

import torch

from pipeloom.errors import InputError
from pipeloom.train.config.inside_stage import tokens_multiple
from pipeloom.train.run_parts import RunParts

_TOKENS = 8  # of a document
_IGNORED = -100
_SAME = 1e-6  # relative: what is masked adds exactly nothing
_ALONE = {"fp32": 1e-5, "bf16": 3e-2, "fp16": 3e-3}  # relative: sums are rounded in another order


def check_packing(run: RunParts) -> None:
    """Validate that a document has the same loss behind any other one, and alone. Every process calls it.

    Raises:
        InputError: attention sees other documents, or positions do not start again.
    """
    config, device = run.config, run.group.device
    multiple = tokens_multiple(config)
    number = max(2 * multiple, min(_TOKENS, config.model.sequence_length // 2) // multiple * multiple)
    draw = torch.Generator().manual_seed(0)
    first, other, document = torch.randint(run.samples.tokenizer.vocabulary_size, (3, number), generator=draw)
    behind, elsewhere, alone = (
        _loss(run, [part.to(device) for part in parts]) for parts in ([first, document], [other, document], [document])
    )
    for one, two, most in ((behind, elsewhere, _SAME), (behind, alone, _ALONE[config.precision.dtype])):
        if not abs(one - two) <= most * abs(two):
            raise InputError(
                f"data.packing=true: the model of {config.model.pretrained} does not keep packed documents apart (the "
                f"loss of a document changes from {two:.6f} to {one:.6f}). Remove data.packing."
            )


def _loss(run: RunParts, documents: list[torch.Tensor]) -> float:
    """The loss of the last of some packed documents, the same in every micro-batch."""
    ids = torch.cat(documents)
    labels = torch.full_like(ids, _IGNORED)
    last = len(documents[-1])
    labels[-last + 1 :] = ids[-last + 1 :]
    positions = torch.cat([torch.arange(len(each), device=each.device) for each in documents])
    pipeline, samples = run.pipeline, run.config.num_microbatches
    inputs: Any = {"input_ids": ids.expand(samples, -1), "position_ids": positions.expand(samples, -1)}
    targets = {"labels": labels.expand(samples, -1)}
    return float(
        pipeline.evaluate(inputs if pipeline.needs_inputs else None, targets if pipeline.needs_targets else None)
    )
