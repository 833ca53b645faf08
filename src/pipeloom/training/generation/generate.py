"""`generate`: the arguments of `Pipeline.generate`, and its result on every process."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeloom.engine.batch import Batch
from pipeloom.engine.executor import Executor
from pipeloom.engine.instructions import Run
from pipeloom.engine.model_state import ModelState
from pipeloom.engine.worker import Bound, Worker
from pipeloom.errors import InputError
from pipeloom.ir import Op
from pipeloom.split.planned.stage import PlannedStage
from pipeloom.training.evaluation_mode import evaluation_mode
from pipeloom.training.generation.decoding import Decoding, Task, token_channels
from pipeloom.training.generation.sampling import Filters
from pipeloom.training.generation.sequences import ModelSequences, PlainSequences, Sequences, can_prepare
from pipeloom.training.generation.whole_sequences import continue_whole
from pipeloom.transport.values import Value

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

_DEFAULT_NEW_TOKENS = 20  # as in transformers
_OTHERS = ("more", "pad_to_multiple_of")  # not of transformers


class Options(NamedTuple):
    """The arguments of `Pipeline.generate` that say how tokens are chosen; None: as the model says."""

    max_new_tokens: int | None
    max_length: int | None
    do_sample: bool | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    eos_token_id: int | list[int] | None
    pad_token_id: int | None
    pad_to_multiple_of: int
    more: Mapping[str, Any]

    def check(self) -> None:
        """Raises InputError for a value that no model takes."""
        for name in ("max_new_tokens", "max_length"):
            count = getattr(self, name)
            if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
                raise InputError(f"{name}={count!r}: must be an integer of at least 1.")
        if self.temperature is not None and not self.temperature > 0:
            raise InputError(
                f"temperature={self.temperature}: must be above 0. Use do_sample=False for the likeliest token."
            )
        if self.top_k is not None and self.top_k < 0:
            raise InputError(f"top_k={self.top_k}: must be at least 1, or 0 for all tokens.")
        if self.pad_to_multiple_of < 1:
            raise InputError(f"pad_to_multiple_of={self.pad_to_multiple_of}: must be at least 1.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InputError(f"top_p={self.top_p}: must be above 0 and at most 1.")

    def whole_sequences(self, state: ModelState, executor: Executor) -> bool:
        """Whether every token needs a forward of whole sequences; the same on all processes."""
        sliced = executor.programs.train.schedule.num_slices > 1 or self.pad_to_multiple_of > 1
        return sliced or executor.batching.parts is not None or not getattr(executor.batching.check, "takes_all", True)

    @property
    def written(self) -> str:
        """The arguments that are numbers, words or lists of them; all processes have to pass the same."""
        plain = int, float, str, list, tuple
        return ", ".join(f"{name}={value!r}" for name, value in self.settings.items() if isinstance(value, plain))

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments of the ``generate`` of a model of transformers."""
        own = {name: value for name, value in self._asdict().items() if name not in _OTHERS and value is not None}
        return {**own, **self.more}


def generate(
    state: ModelState,
    executor: Executor,
    forward: Callable[[Value], Value],
    read_prompt: Callable[[], dict[str, Any] | None],
    options: Options,
    generator: torch.Generator | None,
) -> Tensor:
    """See `Pipeline.generate`.

    Args:
        forward: see `Pipeline.forward`.
        read_prompt: returns arguments of the model; None: this process passes none.
    """
    options.check()
    planned = can_prepare(next(iter(next(iter(executor.workers.values())).stages.values())))
    if not planned and options.more:
        raise InputError(f"generate got {next(iter(options.more))!r}, which only models of transformers take.")
    if executor.programs.train.skips:
        raise InputError("generate: values that skip stages are not supported. Use a model without skips.")
    sharing = state.sharing
    gathers = any(action.op is Op.UNSHARD for _, action in executor.programs.forward.actions())
    stops = not (sharing.replica_ranks and (gathers or sharing.blocks.divides))

    def drawn() -> torch.Generator | None:
        """What draws tokens: alike on the processes inside a stage, which all call it."""
        if generator is not None or not sharing.blocks.divides or options.do_sample is False:
            return generator
        return torch.Generator().manual_seed(sharing.blocks.common(int(torch.randint(2**63 - 1, ()))))

    if options.whole_sequences(state, executor):
        sequences = _whole(read_prompt(), state, options, planned=planned)
        multiple = options.pad_to_multiple_of
        with evaluation_mode(state.modules()):
            return continue_whole(sequences, forward, executor, multiple=multiple, generator=drawn(), stops=stops)

    def make(stage: nn.Module, prompt: Mapping[str, Any]) -> Sequences:
        if isinstance(stage, PlannedStage) and planned:
            return ModelSequences(stage.whole_model, stage.num_blocks, prompt, options.settings)
        return _plain(prompt, state, options)

    def read() -> tuple[Value, Value]:
        prompt = read_prompt()
        if prompt is None or 0 not in state.stages:
            return None, None
        stage = next(worker.stages[0] for worker in executor.workers.values() if 0 in worker.stages)
        given = prompt if planned else _checked_plain(prompt)
        make(stage, given)  # validates the arguments
        return given, None

    @cache
    def task() -> Task:
        return Task(make, drawn(), stops=stops)

    parts: list[Decoding] = []

    def run_rank(worker: Worker, bound: Bound, batch: Batch, call: int) -> Run:  # all ranks are in this call now
        parts.append(Decoding(task(), worker, bound, batch, call, shared=executor.connection.rank is None))
        return parts[-1].run()

    given = "no generator" if generator is None else "a generator"
    with torch.no_grad(), evaluation_mode(state.modules()):
        state.check_around()
        executor.run(
            read,
            training=False,
            with_loss=False,
            share_results=False,
            run_rank=run_rank,
            channels=token_channels(executor),
            settings=f"{options.written}, {given}" if sharing.blocks.divides else options.written,
        )
    return _joined([each.ids for each in parts[0].sequences], [each.pad for each in parts[0].sequences])


def _whole(prompt: dict[str, Any] | None, state: ModelState, options: Options, *, planned: bool) -> PlainSequences:
    """The sequences of a prompt where every token needs a forward of whole sequences."""
    if planned or prompt is None:
        raise InputError(
            "generate where stages share out the tokens or samples of a forward (slices, mesh axis cp, sequence "
            "parallelism, grids): models of transformers are not supported; other processes pass input_ids too."
        )
    return _plain(_checked_plain(prompt), state, options, whole=True)


def _joined(ids: list[Tensor], pads: list[int]) -> Tensor:
    """The sequences of all micro-batches, padded to the longest."""
    longest = max(each.shape[1] for each in ids)
    missing = [longest - each.shape[1] for each in ids]
    pad = nn.functional.pad
    return torch.cat([pad(each, (0, more), value=fill) for each, more, fill in zip(ids, missing, pads, strict=True)])


def prompt_of(input_ids: Value, attention_mask: Tensor | None) -> dict[str, Any] | None:
    """The prompt as arguments of the model; None: this process passes none."""
    if isinstance(input_ids, Mapping):
        prompt = {name: value for name, value in input_ids.items() if value is not None}
        if attention_mask is not None:
            prompt["attention_mask"] = attention_mask
    else:
        prompt = {"input_ids": input_ids}
        if attention_mask is not None:
            prompt["attention_mask"] = attention_mask
    ids = prompt.get("input_ids")
    if ids is None:
        return None
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.dtype not in _INTEGERS or not ids.numel():
        seen = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise InputError(
            f"input_ids is {seen}: must be an integer tensor [samples, tokens] with at least one token. Pad shorter "
            "sequences on the left, and pass attention_mask."
        )
    mask = prompt.get("attention_mask")
    if mask is not None and (not isinstance(mask, Tensor) or mask.shape != ids.shape):
        seen = str(list(mask.shape)) if isinstance(mask, Tensor) else type(mask).__name__
        raise InputError(f"attention_mask is {seen}: must have the shape {list(ids.shape)} of input_ids.")
    return {**prompt, "input_ids": ids.long()}


def _checked_plain(prompt: dict[str, Any]) -> dict[str, Any]:
    """The prompt of a model that is not of transformers."""
    ids, mask = prompt["input_ids"], prompt.get("attention_mask")
    if mask is not None and not mask.bool().all():
        raise InputError(
            "attention_mask has zeros: this model takes no mask. Generate from sequences of one length at a time."
        )
    if prompt.keys() - {"input_ids", "attention_mask"}:
        raise InputError(f"generate got {sorted(prompt)}: this model takes token ids alone. Pass input_ids.")
    return {"input_ids": ids}


def _plain(prompt: Mapping[str, Any], state: ModelState, options: Options, *, whole: bool = False) -> PlainSequences:
    ids, window = prompt["input_ids"], state.sequence_length
    count = options.max_new_tokens or _DEFAULT_NEW_TOKENS
    if options.max_new_tokens is None and options.max_length is not None:
        count = options.max_length - ids.shape[1]
    if count < 1:
        raise InputError(
            f"max_length={options.max_length}: must be longer than the prompts, which have {ids.shape[1]} tokens. Set "
            "max_new_tokens, or a larger max_length."
        )
    fits = window is None or ids.shape[1] + count - 1 <= window
    eos = options.eos_token_id
    ends = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    pad = options.pad_token_id if options.pad_token_id is not None else ends[0] if ends else 0
    temperature, top_k, top_p = options.temperature, options.top_k, options.top_p
    filters = Filters(bool(options.do_sample), temperature or 1.0, top_k or 0, 1.0 if top_p is None else top_p)
    return PlainSequences(
        ids,
        filters,
        eos=ends,
        pad=pad,
        max_new_tokens=count,
        cached=state.keeps_slices and fits and not whole,
        window=window,
    )
