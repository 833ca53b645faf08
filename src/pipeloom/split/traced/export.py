"""Traces a model with torch.export, in training and in evaluation mode."""

import logging
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.export.graph_signature import InputKind
from torch.utils._pytree import TreeSpec, tree_map

from pipeloom.common.overlaps import share_storage
from pipeloom.errors import SplitError, unwrapped
from pipeloom.split.traced.attributes import ChangedAttributes, forbid_changed_constants, tell_set
from pipeloom.split.traced.buffers import settle_buffers
from pipeloom.split.traced.comparison import OwnForward
from pipeloom.split.traced.inputs import Arguments, InputRules, Signature
from pipeloom.split.traced.regions import check_other_regions, inline_regions
from pipeloom.split.traced.segments import written

_WAYS_IN = "Change this line, name the layers with layers=, or pass a list of modules that you wrote, one per stage"
_lock = threading.Lock()  # torch.export patches torch while it runs
_PACKAGE = Path(__file__).parents[2]


class Trace(NamedTuple):
    """A model in one mode, as a graph.

    Attributes:
        graph_module: the graph, with the submodules that its nodes call.
        held: names of the parameters, buffers and constants by placeholder.
        constants: tensors that are neither parameter nor buffer, by name.
        inputs: placeholders of the inputs, in the order of the leaves of a batch.
        rules: what a batch must be for the trace to hold.
        outputs: the structure of the output.
    """

    graph_module: fx.GraphModule
    held: dict[str, str]
    constants: dict[str, Tensor]
    inputs: tuple[str, ...]
    rules: InputRules
    outputs: TreeSpec


def trace_modes(model: nn.Module, example: Any) -> dict[bool, Trace]:
    """The graphs of a model by mode: True for training, with the modes of submodules as they are, else evaluation.

    Raises:
        SplitError: the model cannot be traced; names the line of its code.
    """
    signature = Signature(model, example)
    modes = {part: part.training for part in model.modules()}
    changed = ChangedAttributes(model)
    found = {}
    try:
        for mode in (True, False):
            if model.training is not mode:
                model.train(mode)
            found[mode] = _trace(model, signature, changed)
            for part, training in modes.items():
                part.training = training
    finally:
        for part, training in modes.items():
            part.training = training
    tell_set(model, changed.set_only)
    return found


def _trace(model: nn.Module, signature: Signature, changed: ChangedAttributes) -> Trace:
    args, kwargs = tree_map(_at_least_two, tuple(signature.example))
    auto = torch.export.Dim.AUTO

    def sizes(leaf: Any) -> Any:
        return dict.fromkeys(range(leaf.dim()), auto) if isinstance(leaf, Tensor) else None

    shapes = tree_map(sizes, (args, kwargs))
    sized = signature.by_name(Arguments(*shapes))
    own = OwnForward(model, (args, kwargs))

    def export() -> Any:
        return torch.export.export(model, args, kwargs, dynamic_shapes=sized)

    with _lock, _quiet(), torch.random.fork_rng(devices=()):
        try:
            with changed.watched(), own.traced(), _without_printed_graph():
                exported = export()
        except SplitError:
            raise
        except Exception as error:
            with redirect_stderr(StringIO()), redirect_stdout(StringIO()):
                own.run({})  # an error of its own says that the example does not fit
            raise _explained(model, error) from error
    inline_regions(exported.graph_module)
    check_other_regions(model, exported.graph_module, written)
    held, inputs, constants = {}, [], {}
    for spec in exported.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            inputs.append(spec.arg.name)
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR) and spec.target:
            held[spec.arg.name] = spec.target
            if spec.kind is InputKind.CONSTANT_TENSOR:
                constants[spec.target] = exported.constants[spec.target]
                _refuse_parameter(model, constants[spec.target])
        else:
            raise SplitError(f"{type(model).__name__} uses a {spec.kind.name}, which stages do not carry. {_WAYS_IN}.")
    forbid_changed_constants(model, exported.graph, {key: name for key, name in held.items() if name in constants})
    buffers = {spec.arg.name for spec in exported.graph_signature.input_specs if spec.kind is InputKind.BUFFER}
    settle_buffers(exported.graph, buffers)
    nodes = {node.name: node for node in exported.graph.nodes if node.op == "placeholder"}
    traced = [nodes[name].meta.get("val") for name in inputs]
    for name, value in zip(inputs, traced, strict=True):
        if isinstance(value, Tensor) and (not value.dim() or isinstance(value.shape[0], int)):
            seen = "has no dimension" if not value.dim() else f"has the fixed batch size {value.shape[0]}"
            raise SplitError(
                f"input {name!r} of {type(model).__name__} {seen}, but micro-batches have other sizes. Take sizes from "
                "x.shape, and pass scalars as numbers."
            )
    rules = InputRules(signature, traced, inputs, getattr(exported, "_guards_code", None) or ())
    broken = rules.fixed_batch()
    if broken is not None:
        raise SplitError(
            f"{type(model).__name__} fixes the batch size ({broken}), but micro-batches have other sizes. Take sizes "
            "from x.shape."
        )
    values = tensors_of(model, constants)
    with _lock, _quiet():
        own.check(exported.graph_module, inputs, {name: values[target] for name, target in held.items()}, export)
    return Trace(exported.graph_module, held, constants, tuple(inputs), rules, exported.call_spec.out_spec)


def _refuse_parameter(model: nn.Module, constant: Tensor) -> None:
    """Raises SplitError for a constant of a trace that is a parameter: stages would have a copy of it."""
    name = next((name for name, each in model.named_parameters() if share_storage(each, constant)), None)
    if name is not None:
        raise SplitError(
            f"the forward of {type(model).__name__} reads the parameter {name!r} in another way than from its module, "
            f"such as from a list: a trace would keep its values. Read it as self.{name}, or name the layers with "
            "layers=."
        )


def tensors_of(model: nn.Module, constants: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters and buffers of a model by all their names, with the constants of its trace."""
    tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(model.named_buffers(remove_duplicate=False))
    return {**tensors, **constants}


def _at_least_two(leaf: Any) -> Any:
    """Export takes sizes of 1 as fixed, so a batch of one sample is doubled."""
    if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == 1:
        return torch.cat([leaf, leaf])
    return leaf


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's warnings about sizes that stay fixed."""
    loggers = [logging.getLogger(name) for name in ("torch", "torch._export", "torch.fx", "torch._dynamo")]
    loggers += [
        logging.getLogger(name)
        for name in list(logging.root.manager.loggerDict)
        if name.startswith(("torch._export", "torch.fx", "torch._dynamo", "torch.export"))
    ]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


@contextmanager
def _without_printed_graph() -> Iterator[None]:
    """Without the graph of what was traced before an error, which torch prints; other prints come at the end."""
    graph = None
    try:
        with redirect_stderr(StringIO()) as printed:
            yield
    except Exception as error:
        graph = getattr(error, "partial_fx_graph", None)
        raise
    finally:
        text = printed.getvalue()
        sys.stderr.write(text if graph is None else text.replace(f"{graph}\n", ""))


def _explained(model: nn.Module, error: Exception) -> SplitError:
    """The error with the line of the user's code, the reason, and the other ways in."""
    frames = traceback.extract_tb(error.__traceback__)
    torch_home = str(Path(torch.__file__).parent)
    own = [
        frame
        for frame in frames
        if not frame.filename.startswith((torch_home, str(_PACKAGE), "<")) and frame.name != "<module>"
    ]
    inner = [frame for frame in own if "site-packages" not in frame.filename] or own
    called = [frame for frame in inner if frame.name == "forward" or frame is inner[-1]] if inner else []
    where = f"{called[-1].filename}:{called[-1].lineno}, {called[-1].line!r}" if called else "its forward"
    reason = next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")
    if any(frame.filename.endswith(("nn/modules/rnn.py", "nn/utils/rnn.py")) for frame in frames):
        reason += "; packed sequences depend on the lengths in them"
    if isinstance(error, DataDependentOutputException):
        reason = f"{error.func} returns a value of tensors to Python"
    return SplitError(
        f"{type(model).__name__} cannot be traced at {where}: {unwrapped(reason)}. A trace holds for all inputs, so it "
        f"does not follow values of tensors. {_WAYS_IN}."
    )
