"""`ModelCheck`: compares a pipeline with the uncut model on a sample, for ``Pipeline(..., check=sample)``."""

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pipeloom.autograd.loss_metrics import loss_in
from pipeloom.engine.rank_state import LossFn
from pipeloom.errors import InputError, PipeloomError, folded, one_line
from pipeloom.processes.agreement import gather_json
from pipeloom.processes.members import Members
from pipeloom.split.closeness import close
from pipeloom.split.stage_module import StageModule
from pipeloom.split.traced.inputs import Arguments, Signature
from pipeloom.training.evaluation_mode import evaluation_mode
from pipeloom.training.losses.own_loss import plain_batch
from pipeloom.transport.values import Value, copied, flatten, join_batch, samples_of, split_batch, unflatten


class ModelCheck:
    """What the model computes for a sample, before it is cut.

    Args:
        model: the uncut model.
        sample: inputs of a batch, or the pair (inputs, targets).
        num_microbatches: of the schedule.
        loss_fn: as for `Pipeline`.
        example: of a model that is traced: how a batch is bound to its arguments.

    Raises:
        InputError: no model but its parts, a model on the meta device, or a sample that the model or `loss_fn` does not
            take.
    """

    def __init__(
        self, model: Any, sample: Value, num_microbatches: int, loss_fn: LossFn | None, example: Any = None
    ) -> None:
        if not isinstance(model, nn.Module):
            raise InputError("check: compares with the uncut model, and the model is given in parts. Remove check.")
        if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
            raise InputError("check: the model is on the meta device, without values. Load it first, or remove check.")
        named = (*model.named_parameters(), *model.named_buffers())
        self._weights = {name: _number_of(tensor) for name, tensor in named}
        inputs, targets = sample if isinstance(sample, tuple) and len(sample) == 2 else (sample, None)
        self.inputs = plain_batch(inputs)
        num_microbatches = min(num_microbatches, samples_of(self.inputs, "check: inputs"))
        pieces, self._sizes = split_batch(copied(self.inputs), num_microbatches, "check: inputs")
        self._layers: dict[str, Any] = {}
        outputs = []
        bind = None if example is None else Signature(model, example).bind
        with evaluation_mode([model]), torch.no_grad():
            with _taken(sample, "the forward of the model"):
                with _recorded(dict(model.named_modules()), self._layers):
                    outputs.append(_run(model, pieces[0], bind))
                outputs += [_run(model, piece, bind) for piece in pieces[1:]]
            if loss_fn is not None and targets is not None and not hasattr(loss_fn, "weigh"):
                with _taken(sample, "loss_fn"):
                    self._check_loss(loss_fn, outputs, targets, num_microbatches)
        self._output = join_batch(outputs)

    def _check_loss(self, loss_fn: LossFn, outputs: Sequence[Value], targets: Value, num_microbatches: int) -> None:
        parts, _ = split_batch(targets, num_microbatches, "check: targets")
        shares = [size / sum(self._sizes) for size in self._sizes]
        mean = sum(
            float(loss_in(loss_fn(output, part))) * share
            for output, part, share in zip(outputs, parts, shares, strict=True)
        )
        joined = _joined(outputs, shares)
        if joined is None:
            return
        if isinstance(outputs[0], dict):
            kind: Any = type(outputs[0])
            joined = kind(**joined)
        whole = float(loss_in(loss_fn(joined, targets)))
        if not abs(mean - whole) <= 1e-3 * max(abs(whole), 1e-30):
            warnings.warn(
                f"check: the loss of the whole sample is {whole:.6g}, and {mean:.6g} as the mean over micro-batches. "
                "loss_fn is a mean over the labels of a micro-batch, and micro-batches have different numbers of them. "
                "Pass loss_fn=pipeloom.mean_over_labels(loss_fn), or use a loss with weights per sample.",
                stacklevel=5,
            )

    @contextmanager
    def watching(self, stages: Mapping[int, nn.Module], found: dict[str, Any]) -> Iterator[None]:
        """Record the first results of the layers of this process's stages."""
        layers: dict[str, nn.Module] = {}
        for module in stages.values():
            if isinstance(module, StageModule):
                layers |= {name: part for name, part in module.named_modules() if name in self._layers}
        with _recorded(layers, found):
            yield

    def compare(
        self, output: Value | None, layers: Mapping[str, Any], members: Members | None, line: Sequence[int]
    ) -> None:
        """Compare what the pipeline computed on all its ranks; every process calls it.

        Args:
            output: of the pipeline; None: this process does not have it.
            layers: as `watching` recorded them.
            members: all processes; None: this process holds all ranks.
            line: the processes of this pipeline among `members`, by rank.

        Raises:
            InputError: the models of two ranks have different weights, or the pipeline's output differs from the
                model's, with the first layer that does; on all ranks.
        """
        different = output is not None and _differ(output, self._output)
        differing = [name for name in self._layers if name in layers and _differ(layers[name], self._layers[name])]
        found = [_Finding(different, differing, self._weights)]
        if members is not None:
            every = gather_json(found[0]._asdict(), members, lost="another rank ended or timed out during its check")
            found = [_Finding(**every[process]) for process in line]
        first = found[0].weights
        for rank, each in enumerate(found):
            name = next((name for name in {**first, **each.weights} if each.weights.get(name) != first.get(name)), None)
            if name is not None:
                raise InputError(
                    f"check: {name!r} has other values in the model of rank {rank} than in that of rank 0: all ranks "
                    "must pass the same model. Call torch.manual_seed with the same number on every process before "
                    "the model is made, or load the same weights."
                )
        if any(each.output for each in found):
            raise InputError(
                f"check: the pipeline computes another result than the model; {self._first_of(found)}. Its stages do "
                "not run what its forward does there: pass other layers, or a model whose forward calls its modules in "
                "order."
            )

    def _first_of(self, found: Sequence["_Finding"]) -> str:
        ranks = {name: rank for rank, each in enumerate(found) for name in each.layers}
        differing = [name for name in self._layers if name in ranks]
        first = next((n for n in differing if not any(other.startswith(f"{n}.") for other in differing)), None)
        if first is None:
            return "its layers are equal"
        return f"the first layer that differs is {first!r}" + (f", on rank {ranks[first]}" if len(found) > 1 else "")


class _Finding(NamedTuple):
    """What a rank has found.

    Attributes:
        output: whether the pipeline's output differs from the model's; False where the rank does not have it.
        layers: names of its layers with another result.
        weights: by name of the uncut model's parameters and buffers, a number of their values.
    """

    output: bool
    layers: list[str]
    weights: dict[str, list[Any]]


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _number_of(tensor: Tensor) -> list[Any]:
    """Shape, dtype and the sum of a tensor's bits as integers, which depends on no order."""
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    bits = plain.detach().contiguous().view(_INTEGERS[plain.element_size()])
    return [list(tensor.shape), str(tensor.dtype), int(bits.sum(dtype=torch.int64))]


@contextmanager
def _taken(sample: Value, what: str) -> Iterator[None]:
    """Inside the block, `what` runs on the sample; its errors become InputErrors about the sample."""
    try:
        yield
    except PipeloomError:
        raise
    except Exception as error:
        raise InputError(
            f"check={folded(sample)}: {what} raises {one_line(error).rstrip('.')}. Pass inputs that the model takes, "
            "or the pair (inputs, targets)."
        ) from error


def _run(model: nn.Module, inputs: Value, bind: Callable[[Value], Arguments] | None) -> Value:
    # Stages keep no keys and values for a next token, and the output holds none.
    settings = {name: False for name in ("use_cache", "use_mems") if _takes(model, name)}
    if bind is not None:
        args, kwargs = bind(inputs)
        return model(*args, **kwargs)
    takes_names = isinstance(inputs, dict) and not isinstance(model, nn.Sequential)
    return model(**{**settings, **inputs}) if takes_names else model(inputs, **settings)


def _joined(outputs: Sequence[Value], shares: Sequence[float]) -> Value:
    """The output of the whole sample; scalars, such as auxiliary losses, are means over micro-batches.

    None: numbers of Python in it differ between micro-batches, so it is not known.
    """
    layouts, tensors = zip(*map(partial(flatten, repeated=True), outputs), strict=True)
    if any(layout.structure != layouts[0].structure for layout in layouts):
        return None
    columns = [list(column) for column in zip(*tensors, strict=True)]
    joined = [
        torch.cat(column) if column[0].dim() else sum(each * share for each, share in zip(column, shares, strict=True))
        for column in columns
    ]
    return unflatten(layouts[0], joined)


def _takes(model: nn.Module, name: str) -> bool:
    """Whether the forward takes the argument, or passes it on to the base model."""
    parameters = inspect.signature(model.forward).parameters
    base = getattr(model, "base_model", model)
    passes_on = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    return name in parameters or (passes_on and name in inspect.signature(base.forward).parameters)


@contextmanager
def _recorded(modules: Mapping[str, nn.Module], found: dict[str, Any]) -> Iterator[None]:
    """Record the first result of each module, in the order in which they end."""

    def record(name: str) -> Any:
        def hook(module: nn.Module, args: Any, result: Any) -> None:
            found.setdefault(name, result)

        return hook

    handles = [module.register_forward_hook(record(name)) for name, module in modules.items() if name]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _differ(found: Any, expected: Any) -> bool:
    ours, theirs = _tensors(found), _tensors(expected)
    return len(ours) != len(theirs) or not all(map(close, ours, theirs))


def _tensors(value: Any) -> list[Tensor]:
    """The floating-point tensors with dimensions in a value, in an order that does not depend on its classes."""
    leaves = tree_leaves(dict(value) if isinstance(value, Mapping) else value)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim()]
