"""Writes the model of a run, or its adapters, as a Hugging Face directory."""

import shutil
from pathlib import Path

from pipeloom.data.pretrained_tokenizer import PretrainedTokenizer
from pipeloom.train import run_checkpoints
from pipeloom.train.checkpoint.convert import convert
from pipeloom.train.run_parts import RunParts


def save_pretrained(run: RunParts, out: Path) -> None:
    """Write the model of a run, or its adapters, and its tokenizer to a directory; every process calls it.

    Raises:
        CheckpointError: a process failed to write its part.
    """
    tokenizer = run.samples.tokenizer
    own = tokenizer.own if isinstance(tokenizer, PretrainedTokenizer) else None
    if run.config.model.lora is None:
        run.pipeline.save_pretrained(out, own, overwrite=True)
        return
    scratch = out.with_name(f".{out.name}.partial")
    if run.group.rank == 0:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
    run.group.all_gather(b"")
    checkpoint = run_checkpoints.save_model(run, scratch)
    if run.group.rank == 0:
        convert(checkpoint, scratch / out.name)
        if own is not None:
            own.save_pretrained(scratch / out.name)
        shutil.rmtree(out, ignore_errors=True)
        (scratch / out.name).rename(out)
        shutil.rmtree(scratch)
    run.group.all_gather(b"")  # no process ends before the directory is there
