"""The training loop. Every rank runs `train`, and all of them say the same things in the same order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

from pipeloom.errors import InputError, RunError
from pipeloom.processes.launcher import Membership
from pipeloom.train.config.memory_cap import chosen_words, under_cap
from pipeloom.train.config.slice_lengths import choose_slices
from pipeloom.train.config.train_config import TrainConfig
from pipeloom.train.data.tokenizers import load_tokenizer
from pipeloom.train.output.progress import display
from pipeloom.train.process_group import meet
from pipeloom.train.resume import agreed_checkpoint
from pipeloom.train.trainer import Trainer


def train(config: TrainConfig, member: Membership | None) -> None:
    """Train as one rank of `member`'s run, or as all ranks in this process; `validate` has passed.

    Raises:
        RunError: a loss or gradient that is not finite, a lost rank, a model that raises.
    """
    with ExitStack() as stack:
        group = stack.enter_context(meet(member, config))
        checkpoint = agreed_checkpoint(config, group)
        config, note = choose_slices(config, group, checkpoint)
        vocabulary_size = load_tokenizer(config.data.tokenizer).vocabulary_size
        config, choice = under_cap(config, vocabulary_size, device=group.device.type)
        trainer = stack.enter_context(Trainer(config, group, member))
        done = trainer.resume(checkpoint)
        try:
            with display(shown=group.rank == 0, num_steps=config.steps, done=done, log_steps=config.log_steps) as shown:
                trainer.open_output(shown)
                if note:
                    shown.say(note)
                if choice is not None:
                    shown.say(f"under memory.cap: {chosen_words(config)}")
                for first, last in _stretches(done, config):
                    for row in trainer.steps(first, last, shown):
                        shown.step(row)
                    if _is_due(last, config.eval_steps, config.steps):
                        shown.say(f"step {last}  validation loss {trainer.evaluate(last):.4f}")
                    if _is_due(last, config.save_steps, config.steps):
                        shown.say(f"step {last}  saved {trainer.save(last)}")
            trainer.report(shown)
            if config.sample_tokens:
                shown.say(f"sample:\n{trainer.sample()}")
        except InputError as error:  # the input passed: now it is a failure, such as a disk that is full
            raise RunError(str(error)) from error


def _stretches(done: int, config: TrainConfig) -> Iterator[tuple[int, int]]:
    """First and last steps of the stretches between which the weights are read."""
    first = done + 1
    for step in range(first, config.steps + 1):
        if step == config.steps or any(_is_due(step, n, config.steps) for n in (config.eval_steps, config.save_steps)):
            yield first, step
            first = step + 1


def _is_due(step: int, every: int, last: int) -> bool:
    return bool(every) and (step % every == 0 or step == last)
