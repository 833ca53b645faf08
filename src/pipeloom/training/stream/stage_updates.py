"""One process's optimizer inside a stream: every stage updates by itself, when its own gradient is there.

Of an optimizer over several stages only the parameters of one have a gradient at that moment; torch's optimizers leave
the others alone. Learning rates are set for the update and put back behind the run.
"""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.errors import CallerError, InputError, RunError, one_line
from pipeloom.training.optimizer_step import check_optimizer
from pipeloom.training.pipeline import Pipeline
from pipeloom.training.stream.update_options import StageUpdate, UpdateOptions
from pipeloom.training.stream.update_rules import Rules, update_rules
from pipeloom.training.stream.weight_versions import Gradients, WeightVersions


class StreamOptimizer:
    """Makes the updates of all stages of this process.

    Args:
        optimizer: of this process; None where it has nothing to update.
        options: of the stream.
        pipeline: that it trains.

    Attributes:
        trained: the parameters that the optimizer has.

    Raises:
        InputError: an optimizer that a stream cannot step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None, options: UpdateOptions, pipeline: Pipeline) -> None:
        if optimizer is not None:
            _check_kind(optimizer)
        self._optimizer, self._pipeline = optimizer, pipeline
        self._num_held = sum(map(len, pipeline.state.stages_of.values()))
        self.trained: set[nn.Parameter] = set()
        self._options = options
        self._bound = options.max_norm / math.sqrt(pipeline.schedule.num_stages)
        self._lock = threading.Lock()  # ranks of one process may have a thread each
        self._base: list[float] = []
        self._devices: set[str] = set()
        self.check()

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups if self._optimizer is not None else []

    def check(self) -> None:
        """Raises InputError where its groups do not fit."""
        if self._optimizer is None:
            name = next((name for name, p in self._pipeline.named_parameters() if p.requires_grad), None)
            if name is not None:
                raise InputError(
                    f"optimizer is None and parameter {name!r} of this process wants a gradient: only a process that "
                    "holds none has nothing to update; pass an optimizer, or freeze what it holds"
                )
            return
        check_optimizer(self._pipeline, self._optimizer)
        if self._options.sets_rates and any("lr" not in group for group in self._groups):
            raise InputError(
                f"{type(self._optimizer).__name__} has parameter groups without 'lr': learning_rate, discount and "
                "scale_by_replicas set that; leave them out, or take an optimizer with a learning rate"
            )

    def rules(self, rank: int, rates: list[float] | None) -> Rules:
        """How it updates the stages of a rank that have replicas, with these as `asked_rates` of the first batch."""
        return update_rules(self._pipeline, rank, type(self._optimizer).__name__, self._groups, rates)

    def begin(self) -> None:
        """Note parameters as they are, and learning rates where they are going to be set."""
        self.trained = {parameter for group in self._groups for parameter in group["params"]}
        self._devices = {parameter.device.type for parameter in self.trained}
        if self._options.sets_rates:
            self._base = [float(group["lr"]) for group in self._groups]

    def end(self) -> None:
        """Put the learning rates back."""
        if self._options.sets_rates:
            self._set_rates(self._base, 1.0)

    def apply(
        self, weights: WeightVersions, gradients: Gradients, update: StageUpdate, rates: Sequence[float] | None
    ) -> float:
        """Clip, update, and make the stage's next version.

        Args:
            weights: of the stage.
            gradients: of its parameters.
            update: which it is.
            rates: `rates` for it.

        Returns:
            The 2-norm of the stage's gradient before clipping.

        Raises:
            RunError: it is not finite.
        """
        found = [gradient for gradient in gradients if gradient is not None]
        norm = _norm(found)
        number = float(norm)
        if not math.isfinite(number):
            raise RunError(
                f"update {update.update} of stage {update.stage}, for batch {update.batch}, has gradient norm "
                f"{number}: training cannot go on from there; lower the learning rate, or go on from an earlier state"
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

    def _step(self) -> None:
        if self._optimizer is None:
            return
        if self._num_held == 1:
            self._optimizer.step()
            return
        before = _group_values(self._groups)
        self._optimizer.step()
        self._check_written(before)

    def _check_written(self, before: list[dict[str, object]]) -> None:
        """Stages that share an optimizer share the options of its groups: what a step writes there counts them all."""
        written = {
            key
            for old, new in zip(before, _group_values(self._groups), strict=True)
            for key in new
            if key not in old or new[key] != old[key]
        }
        if written:
            raise RunError(
                f"{type(self._optimizer).__name__} writes {', '.join(sorted(written))} into its parameter groups, and "
                f"this process steps it for {self._num_held} stages, each by itself: state has to be kept by "
                "parameter; run a process for each stage, or take another optimizer"
            )

    def asked_rates(self, batch: int) -> list[float] | None:
        """What `learning_rate` gives, one for each parameter group; None where there is none.

        Raises:
            InputError: it raised, or gave no rates.
        """
        if self._options.learning_rate is None or self._optimizer is None:
            return None
        try:
            given: Any = self._options.learning_rate(batch)
        except Exception as error:
            raise InputError(
                f"learning_rate({batch}) raised {one_line(error)}: it gives the rate for every batch; correct it"
            ) from error
        rates = list(given) if isinstance(given, list | tuple) else [given] * len(self._groups)
        if len(rates) != len(self._groups):
            raise InputError(
                f"learning_rate gave {len(rates)} rates for {len(self._groups)} parameter groups: it gives one for "
                "all, or one for each"
            )
        try:
            numbers = [math.nan if isinstance(rate, str) else float(rate) for rate in rates]
        except (TypeError, ValueError, RuntimeError):  # the last is what a tensor of several numbers raises
            numbers = [math.nan]
        if not all(math.isfinite(number) and number >= 0 for number in numbers):
            raise InputError(
                f"learning_rate({batch}) gave {given!r}: a rate is a finite number from 0, one for all parameter "
                "groups or a list of one for each; correct it"
            )
        return numbers

    def rates(self, update: StageUpdate) -> list[float] | None:
        """`asked_rates` for an update in the middle of a run.

        Raises:
            CallerError: `learning_rate` raised, or gave no rates.
        """
        with self._lock:
            try:
                return self.asked_rates(update.batch)
            except InputError as error:
                raise CallerError(str(error)) from error

    def rate_of_each(self, parameters: Iterable[nn.Parameter], rates: Sequence[float]) -> Tensor:
        """The rate of every parameter, where `rates` are those of the groups; float64, 0 where it is in no group."""
        pairs = zip(self._groups, rates, strict=True)
        rate_of = {parameter: rate for group, rate in pairs for parameter in group["params"]}
        return torch.tensor([rate_of.get(parameter, 0.0) for parameter in parameters], dtype=torch.float64)

    def _set_rates(self, rates: Sequence[float], factor: float) -> None:
        for group, rate in zip(self._groups, rates, strict=True):
            if isinstance(group["lr"], Tensor):  # as optimizers that are captured in graphs keep it
                group["lr"].fill_(rate * factor)
            else:
                group["lr"] = rate * factor


def _check_kind(optimizer: torch.optim.Optimizer) -> None:
    """Raises InputError where a step needs more than gradients, or others than a stream has."""
    kind = type(optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(f"optimizer is a {kind.__name__}: a Stream steps a torch.optim.Optimizer; pass one")
    asked = list(inspect.signature(kind.step).parameters.values())[1:]
    needed = [p.name for p in asked if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if needed:
        raise InputError(
            f"{kind.__name__}.step() needs {', '.join(needed)}: a stream computes gradients itself, once for each "
            "update; take an optimizer whose step() needs nothing"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise InputError("SparseAdam takes sparse gradients: those of a stream are dense; take Adam or AdamW")


def _group_values(groups: list[dict[str, Any]]) -> list[dict[str, object]]:
    """The options of every group, so that they can be compared after some were written in place."""
    return [
        {key: (id(v), v._version) if isinstance(v, Tensor) else repr(v) for key, v in group.items() if key != "params"}
        for group in groups
    ]


def _norm(gradients: list[Tensor]) -> Tensor:
    """What torch.nn.utils.get_total_norm gives, in a fifth of its time where all are of one kind."""
    if len(gradients) != 1 and len({(gradient.device, gradient.dtype) for gradient in gradients}) != 1:
        return torch.nn.utils.get_total_norm(gradients)
    whole = gradients[0] if len(gradients) == 1 else torch.stack(torch._foreach_norm(gradients))
    norm: Tensor = torch.linalg.vector_norm(whole)
    return norm
