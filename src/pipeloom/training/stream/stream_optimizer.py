"""`StreamOptimizer`: one process's optimizer, which updates every stage as soon as its gradient is complete.

During a step of an optimizer over several stages only the parameters of one stage have a gradient; torch's optimizers
skip the others. Learning rates are set before each update and restored after the run.
"""

import inspect
import math
import threading
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.engine.stores.blocks import BlockSum
from pipeloom.errors import CallerError, InputError, RunError, one_line
from pipeloom.training.optimizer_step import check_optimizer
from pipeloom.training.pipeline import Pipeline
from pipeloom.training.stream.update_options import StageUpdate, UpdateOptions
from pipeloom.training.stream.weight_versions import Gradients, WeightVersions

Rules = dict[str, dict[str, str]]  # by stage, as JSON has its keys: what decides about an update, by name


class StreamOptimizer:
    """Makes the updates of all stages of this process.

    Args:
        optimizer: of this process; None where it has nothing to update.

    Attributes:
        trained: the parameters that the optimizer has.

    Raises:
        InputError: the optimizer cannot be used in a stream.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None, options: UpdateOptions, pipeline: Pipeline) -> None:
        self._optimizer, self._pipeline = optimizer, pipeline
        self._num_held = sum(map(len, pipeline.state.stages_of.values()))
        self.trained: set[nn.Parameter] = set()
        self._options = options
        self._bound = options.max_norm / math.sqrt(pipeline.schedule.num_stages)
        self._blocks = pipeline.state.sharing.blocks
        self._sums: dict[int, BlockSum | None] = {}  # by stage, of gradients that processes have in parts
        self._lock = threading.Lock()  # ranks of one process may have a thread each
        self._base: list[float] = []
        self._devices: set[str] = set()
        self.check()

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups if self._optimizer is not None else []

    def check(self) -> None:
        """Raises InputError where the optimizer or the parameters or options of its groups do not match the stream."""
        if self._optimizer is None:
            name = next((name for name, p in self._pipeline.named_parameters() if p.requires_grad), None)
            if name is not None:
                raise InputError(
                    f"optimizer=None: parameter {name!r} of this process requires a gradient. Pass an optimizer, or "
                    "freeze the parameters."
                )
            return
        kind = type(self._optimizer)
        if not isinstance(self._optimizer, torch.optim.Optimizer):
            raise InputError(f"optimizer is a {kind.__name__}: must be a torch.optim.Optimizer.")
        asked = list(inspect.signature(kind.step).parameters.values())[1:]
        needed = [p.name for p in asked if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        if needed:
            raise InputError(
                f"{kind.__name__}.step() needs {', '.join(needed)}: a stream calls step() without arguments. Use "
                "another optimizer."
            )
        if isinstance(self._optimizer, torch.optim.SparseAdam):
            raise InputError("SparseAdam takes sparse gradients: a stream has dense ones. Use Adam or AdamW.")
        check_optimizer(self._pipeline, self._optimizer)
        if self._options.sets_rates and any("lr" not in group for group in self._groups):
            raise InputError(
                f"{kind.__name__} has parameter groups without 'lr', which learning_rate, discount "
                "and scale_by_replicas set. Leave these out, or use an optimizer with a learning rate."
            )

    def rules(self, rank: int, rates: list[float] | None) -> Rules:
        """How a rank updates its stages with replicas: type of the optimizer, options of the groups with parameters.

        Replicas of a stage stay equal because each makes the same updates of the same gradients: their rules have to be
        the same. Other stages may have other optimizers. `rates` are the `asked_rates` of the first batch.
        """
        rules: Rules = {}
        for stage, module in self._pipeline.state.stages_of[rank].items():
            number = {p: k for k, p in enumerate(p for p in module.parameters() if p.requires_grad)}
            if not number or len(self._pipeline.schedule.placement.replicas[stage]) == 1:
                continue
            grouped: list[list[int]] = []
            options: dict[str, str] = {}
            for which, group in enumerate(self._groups):
                held = [number[p] for p in group["params"] if p in number]
                if held:
                    values = {**group, **({} if rates is None else {"lr": rates[which]})}
                    name = f"of group {len(grouped)}"
                    options |= {f"{key} {name}": _text(value) for key, value in values.items() if _is_plain(value)}
                    grouped.append(held)
            rules[str(stage)] = {
                "optimizer": type(self._optimizer).__name__,
                "learning_rate": "of its groups" if rates is None else "from a function",
                "parameters by group": str(grouped),
                **options,
            }
        return rules

    def begin(self) -> None:
        """Record the optimizer's parameters and, where the stream sets them, its learning rates."""
        self.trained = {parameter for group in self._groups for parameter in group["params"]}
        self._devices = {parameter.device.type for parameter in self.trained}
        if self._options.sets_rates:
            self._base = [float(group["lr"]) for group in self._groups]

    def end(self) -> None:
        """Restore the learning rates."""
        if self._options.sets_rates:
            self._set_rates(self._base, 1.0)

    def apply(
        self, weights: WeightVersions, gradients: Gradients, update: StageUpdate, rates: Sequence[float] | None
    ) -> float:
        """Clip, update, and make the stage's next version.

        Returns:
            The 2-norm of the stage's gradient before clipping.

        Raises:
            RunError: it is not finite.
        """
        gradients = self._summed(weights, gradients, update.stage)
        norm = self._norm_of(weights, gradients)
        number = float(norm)
        if not math.isfinite(number):
            raise RunError(
                f"update {update.update} of stage {update.stage}, for batch {update.batch}, has gradient norm "
                f"{number}: training cannot continue. Lower the learning rate, or continue from an earlier checkpoint."
            )

        def step() -> None:
            if math.isfinite(self._bound):
                torch.nn.utils.clip_grads_with_norm_(weights.parameters, self._bound, norm)
            if not any(map(torch.is_autocast_enabled, self._devices)):
                self._step()
                return
            with ExitStack() as stack:  # a run may be inside autocast
                for device in self._devices:
                    stack.enter_context(torch.autocast(device, enabled=False))
                self._step()

        with self._lock:
            if self._options.sets_rates:
                self._set_rates(rates or self._base, self._options.factor(update))
            weights.update(update.update, gradients, step)
        return number

    def _summed(self, weights: WeightVersions, gradients: Gradients, stage: int) -> Gradients:
        """The gradients, with sums over the processes that share the stage where each has a part."""
        if not self._blocks.divides:
            return gradients
        if stage not in self._sums:
            named = {str(number): parameter for number, parameter in enumerate(weights.parameters)}
            self._sums[stage] = self._blocks.gradient_sum(named, {}, lambda name: named[name].dtype)
        sums = self._sums[stage]
        if sums is None:
            return gradients
        number = {parameter: index for index, parameter in enumerate(weights.parameters)}
        places, found = [number[parameter] for parameter in sums.parameters], list(gradients)
        for place, total in zip(places, sums.total([gradients[place] for place in places]), strict=True):
            found[place] = total
        return found

    def _norm_of(self, weights: WeightVersions, gradients: Gradients) -> Tensor:
        """The 2-norm of the stage's gradient, over all processes that share the stage."""
        pairs = [(p, g) for p, g in zip(weights.parameters, gradients, strict=True) if g is not None]
        if not self._blocks.divides:
            return _norm([gradient for _, gradient in pairs])
        owned = [part for p, g in pairs for part in self._blocks.owned(p, g, None)]
        device, dtype = (pairs[0][1].device, pairs[0][1].dtype) if pairs else (None, torch.float32)
        squares = torch.zeros((), dtype=torch.float64, device=device)
        for part in owned:
            squares += torch.linalg.vector_norm(part).double().square()
        return self._blocks.sum(squares).sqrt().to(dtype)

    def _step(self) -> None:
        if self._optimizer is None:
            return
        if self._num_held == 1:
            self._optimizer.step()
            return
        before = _group_values(self._groups)  # which all stages of the process share
        self._optimizer.step()
        pairs = zip(before, _group_values(self._groups), strict=True)
        written = {key for old, new in pairs for key in new if key not in old or new[key] != old[key]}
        if written:
            raise RunError(
                f"{type(self._optimizer).__name__} writes {', '.join(sorted(written))} into its parameter groups, but "
                f"this process steps it separately for {self._num_held} stages, so it must keep its state per "
                "parameter. Run one process per stage, or use another optimizer."
            )

    def asked_rates(self, batch: int) -> list[float] | None:
        """The rates that `learning_rate` returns, one per parameter group; None where it is None.

        Raises:
            InputError: it raised, or returned an invalid value.
        """
        if self._options.learning_rate is None or self._optimizer is None:
            return None
        try:
            given: Any = self._options.learning_rate(batch)
        except Exception as error:
            raise InputError(
                f"learning_rate({batch}) raised {one_line(error)}: it must return a learning rate for every batch."
            ) from error
        rates = list(given) if isinstance(given, list | tuple) else [given] * len(self._groups)
        if len(rates) != len(self._groups):
            raise InputError(
                f"learning_rate returned {len(rates)} rates for {len(self._groups)} parameter groups. Return one for "
                "all groups, or one per group."
            )
        try:
            numbers = [math.nan if isinstance(rate, str) else float(rate) for rate in rates]
        except (TypeError, ValueError, RuntimeError):  # the last is what a tensor of several numbers raises
            numbers = [math.nan]
        if not all(math.isfinite(number) and number >= 0 for number in numbers):
            raise InputError(
                f"learning_rate({batch}) returned {given!r}: must be a finite number >= 0 for all parameter groups, or "
                "a list of one per group."
            )
        return numbers

    def rates(self, update: StageUpdate) -> list[float] | None:
        """`asked_rates` for an update in the middle of a run.

        Raises:
            CallerError: `learning_rate` raised, or returned an invalid value.
        """
        with self._lock:
            try:
                return self.asked_rates(update.batch)
            except InputError as error:
                raise CallerError(str(error)) from error

    def rate_of_each(self, parameters: Iterable[nn.Parameter], rates: Sequence[float]) -> Tensor:
        """The learning rate of every parameter in float64, 0 for parameters in no group; `rates` has one per group."""
        pairs = zip(self._groups, rates, strict=True)
        rate_of = {parameter: rate for group, rate in pairs for parameter in group["params"]}
        return torch.tensor([rate_of.get(parameter, 0.0) for parameter in parameters], dtype=torch.float64)

    def _set_rates(self, rates: Sequence[float], factor: float) -> None:
        for group, rate in zip(self._groups, rates, strict=True):
            if isinstance(group["lr"], Tensor):  # optimizers that are captured in CUDA graphs keep it as a tensor
                group["lr"].fill_(rate * factor)
            else:
                group["lr"] = rate * factor


def _group_values(groups: list[dict[str, Any]]) -> list[dict[str, object]]:
    """The options of every group, comparable also after tensors among them were changed in place."""
    return [
        {key: (id(v), v._version) if isinstance(v, Tensor) else repr(v) for key, v in group.items() if key != "params"}
        for group in groups
    ]


def _norm(gradients: list[Tensor]) -> Tensor:
    """The same as torch.nn.utils.get_total_norm, in a fifth of the time for gradients of one dtype and device."""
    if len(gradients) != 1 and len({(gradient.device, gradient.dtype) for gradient in gradients}) != 1:
        return torch.nn.utils.get_total_norm(gradients)
    whole = gradients[0] if len(gradients) == 1 else torch.stack(torch._foreach_norm(gradients))
    norm: Tensor = torch.linalg.vector_norm(whole)
    return norm


def _is_plain(value: Any) -> bool:
    """Whether an option is a number, a word, or a tuple of these such as betas."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    if isinstance(value, Tensor):
        return value.numel() == 1
    return value is None or isinstance(value, int | float | str)


def _text(value: Any) -> str:
    """A text that is equal for equal values, such as 1, 1.0 and a tensor of 1."""
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))})"
    number = isinstance(value, int | float | Tensor) and not isinstance(value, bool)
    return str(float(value)) if number else str(value)
