"""The sequences of one micro-batch while they grow, as one rank sees them.

ModelSequences    of a model of transformers: its own generation configuration, logits processors, inputs and caches
PlainSequences    of other models: token ids [B, S] -> logits [B, S, V]
"""

import copy
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.errors import InputError, unwrapped
from pipeloom.slicing import SliceContext
from pipeloom.split.planned.stage import PlannedStage
from pipeloom.training.generation.sampling import Draws, Filters
from pipeloom.transport.values import Value

# Fields of a generation configuration that need several forwards per token, or other results.
_UNSUPPORTED = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "penalty_alpha": None,
    "prompt_lookup_num_tokens": None,
    "dola_layers": None,
    "assistant_early_exit": None,
    "prefill_chunk_size": None,
    "return_dict_in_generate": False,
    "guidance_scale": None,
}
_CACHES = ("past_key_values", "cache_params")  # arguments of a forward; the second of state-space models
_UNSUPPORTED_ARGUMENTS = ("assistant_model", "custom_generate", "negative_prompt_ids", "streamer", "synced_gpus")


class Sequences(ABC):
    """The sequences of one micro-batch.

    Attributes:
        ids: tokens so far, [B, S].
        ended: whether all have ended.
        pad: the token behind the end of a sequence.
        max_new_tokens: the most behind a prompt.
    """

    ids: Tensor
    max_new_tokens: int
    pad: int = 0
    ended: bool = False

    @abstractmethod
    def inputs(self, stage: nn.Module) -> Value:
        """The inputs of the first stage for the next token."""

    @abstractmethod
    def caching(self, stage: nn.Module) -> AbstractContextManager[Any]:
        """Around a forward of a stage, which finds the keys and values of earlier tokens."""

    @abstractmethod
    def choose(self, logits: Tensor, draws: Draws, first_row: int, number: int) -> tuple[Tensor, bool]:
        """The next token of each sequence, and whether all sequences have ended.

        Args:
            logits: of the model, [B, S, V].
            first_row: of the micro-batch in the batch.
            number: of the token, from 0.
        """

    def append(self, tokens: Tensor, *, ended: bool) -> None:
        """Add a token to each sequence."""
        self.ids = torch.cat([self.ids, tokens.to(self.ids.device)[:, None]], 1)
        self.ended = ended


class ModelSequences(Sequences):
    """Sequences of a model of transformers, which prepares their generation on every rank.

    Args:
        model: the shell of a stage (see `PlannedStage`): an instance of the model's class with its configuration.
        num_blocks: repeated layers of the whole model.
        prompt: "input_ids" and optionally other arguments of the model's ``generate``.
        settings: further arguments of it.

    Raises:
        InputError: the model cannot generate this way.
    """

    def __init__(self, model: Any, num_blocks: int, prompt: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        self._model = model
        found = _prepared(model, prompt, settings)
        cache = next((each for name in _CACHES if (each := found.arguments.get(name)) is not None), None)
        if cache is not None and not _fits_stages(cache, num_blocks):
            found = _prepared(model, prompt, {**settings, "use_cache": False})
            cache = None
        self._arguments, self._processors, self._criteria = found.arguments, found.processors, found.criteria
        self._config, self._cache = found.config, cache
        for name in _CACHES:
            self._arguments.pop(name, None)
        self._caches: dict[nn.Module, Any] = {}
        self.ids, self._is_first = found.ids, True
        self.max_new_tokens = self._config.max_length - found.ids.shape[1]
        self._ends = any(hasattr(criterion, "eos_token_id") for criterion in self._criteria)
        pad = self._config._pad_token_tensor
        self.pad = 0 if pad is None else int(pad)
        self._unfinished = torch.ones(len(self.ids), dtype=torch.long, device=self.ids.device)

    def inputs(self, stage: nn.Module) -> Value:
        given = {**self._arguments, **({} if self._cache is None else {"past_key_values": self._cache_of(stage)})}
        length = None if self._is_first or self._cache is None else 1
        made = self._model.prepare_inputs_for_generation(
            self.ids, next_sequence_length=length, is_first_iteration=self._is_first, **given
        )
        made.pop("past_key_values", None)
        return {**made, "return_dict": True}

    def _cache_of(self, stage: nn.Module) -> Any:
        if stage not in self._caches:
            self._caches[stage] = copy.deepcopy(self._cache)
        return self._caches[stage]

    def caching(self, stage: nn.Module) -> AbstractContextManager[Any]:
        if self._cache is None or not isinstance(stage, PlannedStage):
            return nullcontext()
        return stage.decoding(self._cache_of(stage))

    def choose(self, logits: Tensor, draws: Draws, first_row: int, number: int) -> tuple[Tensor, bool]:
        last = logits[:, -1].to(copy=True, dtype=torch.float32, device=self.ids.device)
        scores = self._processors(self.ids, last)
        if self._config.do_sample:
            tokens = draws.choose(scores.softmax(-1), first_row, number)
        else:
            tokens = scores.argmax(-1)
        if self._ends:
            tokens = tokens * self._unfinished + self._config._pad_token_tensor * (1 - self._unfinished)
        after = torch.cat([self.ids, tokens[:, None]], 1)
        self._unfinished &= ~self._criteria(after, None)
        return tokens, not bool(self._unfinished.any())

    def append(self, tokens: Tensor, *, ended: bool) -> None:
        super().append(tokens, ended=ended)
        self._is_first = False
        self._arguments = self._model._update_model_kwargs_for_generation({}, self._arguments, is_encoder_decoder=False)


def _prepared(model: Any, prompt: Mapping[str, Any], settings: Mapping[str, Any]) -> SimpleNamespace:
    """What the model's ``generate`` makes of its arguments before it decodes."""

    def capture(
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **more: Any,
    ) -> SimpleNamespace:
        return SimpleNamespace(
            ids=input_ids,
            processors=logits_processor,
            criteria=stopping_criteria,
            config=generation_config,
            arguments={key: value for key, value in more.items() if key not in ("synced_gpus", "streamer")},
        )

    own: Any = sys.modules["transformers"].GenerationMixin
    if type(model)._sample is not own._sample:
        raise InputError(
            f"generate of {type(model).__name__}: it chooses tokens in its own way, which pipelines do not support."
        )
    wrong = next((name for name in _UNSUPPORTED_ARGUMENTS if settings.get(name) is not None), None)
    if wrong is not None:
        raise InputError(f"generate got {wrong!r}, which pipelines do not support. Remove it.")
    _check_ids(model, prompt)
    try:
        found: SimpleNamespace = model.generate(**prompt, **settings, custom_generate=capture)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"generate of {type(model).__name__}: {unwrapped(str(error))}") from error
    for name, default in _UNSUPPORTED.items():
        value = getattr(found.config, name, default)
        if value not in (None, default):
            raise InputError(
                f"{name}={value}: generate of a pipeline chooses one token per sequence per forward. Remove it."
            )
    if getattr(model.config, "is_encoder_decoder", False):
        raise InputError(f"generate of {type(model).__name__}: encoder-decoder models are not supported.")
    return found


def _check_ids(model: Any, prompt: Mapping[str, Any]) -> None:
    """Raises InputError for ids that the embedding has no row for. Prompts with images may mark their places so."""
    embedding = model.get_input_embeddings()
    if not isinstance(embedding, nn.Embedding) or prompt.keys() - {"input_ids", "attention_mask"}:
        return
    ids, size = prompt["input_ids"], embedding.num_embeddings
    wrong = ids[(ids < 0) | (ids >= size)]
    if wrong.numel():
        raise InputError(
            f"input_ids has {int(wrong[0])}: token ids of {type(model).__name__} are from 0 to {size - 1}. Use its own "
            "tokenizer, and pad with one of its tokens."
        )


def _fits_stages(cache: Any, num_blocks: int) -> bool:
    """Whether a stage can keep the entries of its own layers: keys and values, and of each layer its own."""
    shares = 0 < len(cache.layers) < num_blocks  # layers use the keys of others, which another stage may have
    return not shares and all(map(_holds_keys, cache.layers))


def _holds_keys(layer: Any) -> bool:
    """Whether a layer of a cache holds keys and values of tokens, and nothing else."""
    return hasattr(layer, "get_seq_length") and not hasattr(layer, "update_recurrent_state")


def can_prepare(stage: nn.Module) -> bool:
    """Whether a stage belongs to a model of transformers that generates."""
    return isinstance(stage, PlannedStage) and hasattr(stage.whole_model, "prepare_inputs_for_generation")


class PlainSequences(Sequences):
    """Sequences of a model that takes token ids and returns logits.

    Args:
        ids: prompts, [B, S], without padding.
        filters: of logits.
        eos, pad: tokens that end a sequence, and the token behind an end.
        max_new_tokens: the most.
        cached: whether stages keep keys and values as slices of a sequence do.
        window: the most tokens that the model takes; only with `cached` off.
    """

    def __init__(
        self,
        ids: Tensor,
        filters: Filters,
        *,
        eos: tuple[int, ...],
        pad: int,
        max_new_tokens: int,
        cached: bool,
        window: int | None,
    ) -> None:
        self.ids, self._filters, self.pad, self.max_new_tokens = ids, filters, pad, max_new_tokens
        self._eos = torch.tensor(eos, dtype=torch.long, device=ids.device)
        self._contexts: dict[nn.Module, tuple[SliceContext, int]] = {}
        self._cached, self._window = cached, window
        self._last = ids.shape[1] + max_new_tokens - 1
        self._finished = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        self._start = 0

    def inputs(self, stage: nn.Module) -> Value:
        if self._cached:
            return self.ids[:, self._start :]
        return self.ids if self._window is None else self.ids[:, -self._window :]

    def caching(self, stage: nn.Module) -> AbstractContextManager[Any]:
        if not self._cached:
            return nullcontext()
        context, number = self._contexts.get(stage, (SliceContext(), 0))
        self._contexts[stage] = context, number + 1
        return context.slice(number, self._start, self.ids.shape[1], self._last)

    def choose(self, logits: Tensor, draws: Draws, first_row: int, number: int) -> tuple[Tensor, bool]:
        scores = logits[:, -1].float()
        if self._filters.do_sample:
            tokens = draws.choose(self._filters.probabilities(scores), first_row, number)
        else:
            tokens = scores.argmax(-1)
        tokens = torch.where(self._finished, self.pad, tokens)
        self._finished |= torch.isin(tokens, self._eos)
        return tokens, bool(self._finished.all())

    def append(self, tokens: Tensor, *, ended: bool) -> None:
        self._start = self.ids.shape[1]
        super().append(tokens, ended=ended)
