"""`generate`: the arguments of `Pipeline.generate`, and its result on every process."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeloom.engine.batch import Batch
from pipeloom.engine.executor import Executor
from pipeloom.engine.instructions import Run
from pipeloom.engine.model_state import ModelState
from pipeloom.engine.worker import Bound, Worker
from pipeloom.errors import InputError
from pipeloom.parallel.tensor.batch_rule import BatchRule
from pipeloom.split.planned.stage import PlannedStage
from pipeloom.training.evaluation_mode import evaluation_mode
from pipeloom.training.generation.decoding import Decoding, Task, token_channels
from pipeloom.training.generation.sampling import Filters
from pipeloom.training.generation.sequences import ModelSequences, PlainSequences, Sequences, can_prepare
from pipeloom.transport.values import Value

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class Options(NamedTuple):
    """The arguments of `Pipeline.generate` that say how tokens are chosen; None: as the model says."""

    max_new_tokens: int
    do_sample: bool | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    eos_token_id: int | list[int] | None
    pad_token_id: int | None
    more: Mapping[str, Any]

    def check(self) -> None:
        """Raises InputError for a value that no model takes."""
        count = self.max_new_tokens
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise InputError(f"max_new_tokens={count!r}: must be an integer of at least 1.")
        if self.temperature is not None and not self.temperature > 0:
            raise InputError(
                f"temperature={self.temperature}: must be above 0. Use do_sample=False for the likeliest token."
            )
        if self.top_k is not None and self.top_k < 0:
            raise InputError(f"top_k={self.top_k}: must be at least 1, or 0 for all tokens.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InputError(f"top_p={self.top_p}: must be above 0 and at most 1.")

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments of the ``generate`` of a model of transformers."""
        own = {name: value for name, value in self._asdict().items() if name != "more" and value is not None}
        return {**own, **self.more}


def generate(
    state: ModelState,
    executor: Executor,
    input_ids: Value,
    attention_mask: Tensor | None,
    options: Options,
    generator: torch.Generator | None,
) -> Tensor:
    """See `Pipeline.generate`."""
    options.check()
    _check_pipeline(state, executor)
    planned = can_prepare(next(iter(next(iter(executor.workers.values())).stages.values())))
    if not planned and options.more:
        raise InputError(f"generate got {next(iter(options.more))!r}, which only models of transformers take.")
    sharing = state.sharing
    meets = bool(sharing.replica_ranks) and (sharing.sharded or sharing.blocks.divides)
    if generator is None and sharing.blocks.divides and options.do_sample is not False:
        generator = torch.Generator().manual_seed(sharing.blocks.common(int(torch.randint(2**63 - 1, ()))))

    def make(stage: nn.Module, prompt: Mapping[str, Any]) -> Sequences:
        if isinstance(stage, PlannedStage) and planned:
            return ModelSequences(stage.shell, prompt, options.settings)
        return _plain(prompt, options)

    def read() -> tuple[Value, Value]:
        prompt = _prompt(input_ids, attention_mask)
        if prompt is None or 0 not in state.stages:
            return None, None
        stage = next(worker.stages[0] for worker in executor.workers.values() if 0 in worker.stages)
        if not BatchRule(state.modules(), 1).takes_all:
            raise InputError(
                "generate with sequence parallelism or a tensor-parallel grid: forwards of one token cannot be "
                "shared out. Use layout '1d' without sequence parallelism."
            )
        if not planned:
            prompt = _checked_plain(prompt, state, options)
        make(stage, prompt)  # validates the arguments
        return prompt, None

    task = Task(make, options.max_new_tokens, generator, stops=not meets)
    executor.open_channels(token_channels(executor))
    parts: list[Decoding] = []

    def run_rank(worker: Worker, bound: Bound, batch: Batch, call: int) -> Run:
        parts.append(Decoding(task, worker, bound, batch, call, shared=executor.connection.rank is None))
        return parts[-1].run()

    with torch.no_grad(), evaluation_mode(state.modules()):
        executor.run(read, training=False, with_loss=False, share_results=False, run_rank=run_rank)
    return _joined([each.ids for each in parts[0].sequences], [each.pad for each in parts[0].sequences])


def _joined(ids: list[Tensor], pads: list[int]) -> Tensor:
    """The sequences of all micro-batches, padded to the longest."""
    longest = max(each.shape[1] for each in ids)
    missing = [longest - each.shape[1] for each in ids]
    pad = nn.functional.pad
    return torch.cat([pad(each, (0, more), value=fill) for each, more, fill in zip(ids, missing, pads, strict=True)])


def _check_pipeline(state: ModelState, executor: Executor) -> None:
    schedule = executor.programs.train.schedule
    if executor.parts is not None or schedule.num_slices > 1:
        raise InputError(
            f"generate with schedule {schedule.name!r}: parts of sequences (slices, mesh axis cp) are not supported. "
            "Make a pipeline of whole sequences, such as 1f1b without axis cp."
        )
    if executor.programs.train.skips:
        raise InputError("generate: values that skip stages are not supported. Use a model without skips.")


def _prompt(input_ids: Value, attention_mask: Tensor | None) -> dict[str, Any] | None:
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


def _checked_plain(prompt: dict[str, Any], state: ModelState, options: Options) -> dict[str, Any]:
    """The prompt of a model that is not of transformers, with how it runs, on the rank with the first stage."""
    ids, mask = prompt["input_ids"], prompt.pop("attention_mask", None)
    if mask is not None and not mask.bool().all():
        raise InputError(
            "attention_mask has zeros: this model takes no mask. Generate from sequences of one length at a time."
        )
    if len(prompt) > 1:
        raise InputError(f"generate got {sorted(prompt)}: this model takes token ids alone. Pass input_ids.")
    lengths = (getattr(part, "sequence_length", None) for module in state.modules() for part in module.modules())
    window = min((length for length in lengths if isinstance(length, int)), default=0)
    cached = state.keeps_slices and (not window or ids.shape[1] + options.max_new_tokens - 1 <= window)
    samples = len(ids)  # what all ranks must know travels with the prompts, whose tensors are cut by sample
    return {"input_ids": ids, "cached": torch.full((samples,), cached), "window": torch.full((samples,), window)}


def _plain(prompt: Mapping[str, Any], options: Options) -> PlainSequences:
    eos = options.eos_token_id
    ends = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    pad = options.pad_token_id if options.pad_token_id is not None else ends[0] if ends else 0
    temperature, top_k, top_p = options.temperature, options.top_k, options.top_p
    filters = Filters(bool(options.do_sample), temperature or 1.0, top_k or 0, 1.0 if top_p is None else top_p)
    return PlainSequences(
        prompt["input_ids"],
        filters,
        eos=ends,
        pad=pad,
        max_new_tokens=options.max_new_tokens,
        cached=bool(prompt["cached"][0]),
        window=int(prompt["window"][0]) or None,
    )
