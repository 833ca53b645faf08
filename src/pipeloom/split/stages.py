"""`split`: cuts a model into stages that together hold exactly its parameters."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from torch import Tensor, nn

from pipeloom.common.quantities import counted
from pipeloom.errors import SplitError, folded
from pipeloom.ir import SkippingValue
from pipeloom.split.chain_partition import Tie, consecutive, find_ties
from pipeloom.split.huggingface import Decoder, DecoderStage, find_decoder
from pipeloom.split.layers import ChainLayer, check_complete, check_memory, count_layers, find_layers
from pipeloom.split.layouts.around import AroundLayers
from pipeloom.split.layouts.layout import Layout, find_layout, runs_in_order
from pipeloom.split.planned.collected import hooks_installed
from pipeloom.split.planned.module_copies import without_memory
from pipeloom.split.planned.stage import PlannedStage
from pipeloom.split.profile import LayerTime, LossFn, profile_layers
from pipeloom.split.skippable import skips_of
from pipeloom.split.skips import chain_stage, find_skips, skip_names
from pipeloom.split.stage_module import StageModule


@dataclass(frozen=True)
class TiedParameter:
    """A parameter that several stages hold.

    Attributes:
        name: its canonical name, the first one in ``model.named_parameters()``.
        names: all its fully qualified names.
        stages: the stages that hold it, ascending.
    """

    name: str
    names: tuple[str, ...]
    stages: tuple[int, ...]


@dataclass
class Stages:
    """A model split into stages.

    Attributes:
        modules: one module per stage: ``forward(value)`` runs its layers; its state-dict keys are those of the model.
        tied: the parameters that several stages hold.
        parameter_names: canonical names in the order of ``model.named_parameters()``, each tied parameter once.
        layers: per stage, the fully qualified names of its layers.
        canonical_names: alias of a tied parameter -> its canonical name.
        skips: the values that skip stages.
        whole: the uncut model without values, where it is one of transformers.
        model: returns the uncut model while the caller keeps it, else None.
        around: the modules around the layers.
    """

    modules: list[nn.Module]
    tied: tuple[TiedParameter, ...]
    parameter_names: tuple[str, ...]
    layers: tuple[tuple[str, ...], ...]
    canonical_names: dict[str, str] = field(default_factory=dict)
    skips: tuple[SkippingValue, ...] = ()
    whole: nn.Module | None = None
    model: Callable[[], nn.Module | None] = lambda: None
    around: AroundLayers = field(default_factory=AroundLayers.nothing)


def split(
    model: nn.Module | Sequence[nn.Module],
    num_stages: int,
    *,
    layers: Sequence[str] | None = None,
    cut: str | Sequence[int] | Sequence[str] = "layers",
    sample: Any = None,
    loss_fn: LossFn | None = None,
    parts_of_sequences: bool = False,
    example: Any = None,
    agree: Callable[[list[float]], list[float]] = lambda times: times,
) -> Stages:
    """Split `model` into `num_stages` contiguous stages.

    The stages hold the model's own modules, without copies. A module may be used in several places.

    Args:
        model: an nn.Sequential (its children are the layers), a model with `layers`, a Hugging Face decoder (see
            `pipeloom.split.huggingface`), or a list of modules, one per stage, which is used unchanged (parameter names
            that occur in two of its modules are prefixed with the position of the module).
        num_stages: how many stages.
        layers: fully qualified names of the layers in execution order, such as
            ``["embedding", "blocks.*", "norm", "head"]``; a ``*`` matches all members of a container. Defaults to the
            model's attribute ``pipeline_layers``, if it has one.
        cut: what to balance. "layers": the number of layers; if a ``*`` matched some, only these count, and the others
            join their neighbours. "parameters": the number of parameters, tied ones once per stage that has them.
            "time": forward and backward time measured on `sample`. A list: the number of layers (or counted layers) per
            stage; 0 gives the first or last stage only layers that do not count.
        sample: for "time", the input of one micro-batch; with `loss_fn`, the pair (inputs, targets).
        loss_fn: for "time", ``loss_fn(output, targets)``; its time is added to the last layer's.
        example: inputs of one micro-batch, for a model that is traced with torch.export (see
            `pipeloom.split.traced`): ``(args, kwargs)``, a tuple of arguments, a dict of keyword arguments, or the only
            argument; not together with `layers`. `cut` is then "time", "parameters", or the names of the modules at
            which the stages after the first begin.
        agree: returns the times that the first process measured, so that all processes cut a traced model alike.
        parts_of_sequences: whether the stages run slices of sequences or the tokens of context-parallel ranks.

    Raises:
        SplitError: an unknown name, more stages than layers, counts that do not add up, `layers` and `example`, or a
            parameter or persistent buffer that would be in no stage.
    """
    if not isinstance(num_stages, int) or num_stages < 1:
        raise SplitError(f"num_stages={num_stages!r}: must be an integer >= 1.")
    if not isinstance(model, nn.Module):
        return _given_stages(model, num_stages)
    if example is not None and layers is not None:
        raise SplitError(
            "layers and example are both given: with `layers`, stages run the model's own forward; with `example`, "
            "parts of its trace. Pass one of them."
        )
    if example is not None:
        from pipeloom.split.traced.cutting import traced_stages  # loads torch.export, which takes seconds

        traced, calls = traced_stages(model, num_stages, example, "time" if cut == "layers" else cut, agree)
        return _describe(traced, calls, model)
    counts: Any = cut  # a model that is not traced is cut by numbers of layers
    way = _way_in(model, layers, num_stages, parts_of_sequences)
    named = layers is not None or hasattr(model, "pipeline_layers")
    whole = num_stages == 1 and not named and way is None
    if whole and not isinstance(model, nn.Sequential):  # no cut, so the layers need not be known
        return _describe([model], [("",)], model)
    chain, make_stage = _find_chain(model, layers, way)
    pieces = consecutive(chain, count_layers(chain, num_stages, counts, sample, loss_fn, make_stage))
    modules = [make_stage(piece) for piece in pieces]
    for module in modules:
        module.training = model.training  # only of the stage itself: each layer keeps its own mode
        if isinstance(module, PlannedStage):
            module.know_cut([len(piece) for piece in pieces])
    names = [tuple(layer.name for layer in piece) for piece in pieces]
    return _describe(modules, names, model)


def profile_model(
    model: nn.Module | Sequence[nn.Module],
    sample: Any,
    *,
    layers: Sequence[str] | None = None,
    loss_fn: LossFn | None = None,
    num_warmups: int = 2,
    num_rounds: int = 5,
) -> tuple[list[LayerTime], list[Tie]]:
    """Measure every layer of a model that `split` supports, each as a separate stage (see `profile_layers`).

    Args:
        model: as for `split`; each module of a list counts as one layer.
        sample: the input of one micro-batch; with `loss_fn`, the pair (inputs, targets).
        layers: as for `split`.
        loss_fn: its time is added to the last layer's.
        num_warmups: rounds that are discarded.
        num_rounds: rounds whose median is reported.

    Returns:
        Times and sizes of the layers, and the bytes of parameters that several layers share.
        ``Profile.of(*profile_model(model, sample))`` is the input of `pipeloom.plan.partition`.

    Raises:
        SplitError: the layers of the model are unknown, or it is on the meta device.
    """
    modules = [(name, module) for name, module, _ in single_layers(model, layers)]
    times = profile_layers(modules, sample, loss_fn=loss_fn, num_warmups=num_warmups, num_rounds=num_rounds)
    return times, find_ties([{id(p): p.nbytes for p in module.parameters()} for _, module in modules])


def knows_layers(model: nn.Module | Sequence[nn.Module]) -> bool:
    """Whether `split` finds the layers of a model that it gets without `layers` and without `example`."""
    if not isinstance(model, nn.Module) or isinstance(model, nn.Sequential) or hasattr(model, "pipeline_layers"):
        return True
    return _way_in(model, None, 2, False) is not None


def single_layers(
    model: nn.Module | Sequence[nn.Module], layers: Sequence[str] | None = None
) -> list[tuple[str, nn.Module, bool]]:
    """Every layer of a model that `split` supports: its name, a stage of it alone, and whether a cut counts it.

    Args:
        model: as for `split`; each module of a list counts as one layer.
        layers: as for `split`.

    Raises:
        SplitError: the layers of the model are unknown.
    """
    if not isinstance(model, nn.Module):
        return [(str(index), module, True) for index, module in enumerate(_given_stages(model).modules)]
    chain, make_stage = _find_chain(model, layers, _way_in(model, layers, 2, False))
    return [(layer.name, make_stage([layer]), layer.counted) for layer in chain]


def _way_in(
    model: nn.Module, layers: Sequence[str] | None, num_stages: int, parts_of_sequences: bool
) -> Decoder | Layout | None:
    """How a model is cut.

    Returns:
        A layout: stages run the model's own forward. A decoder: stages call its modules, also for parts of sequences.
        None: stages run a chain of layers.

    Raises:
        SplitError: the model changes its forward in a way that stages for parts of sequences do not run.
    """
    if layers is None and not hasattr(model, "pipeline_layers") and not isinstance(model, nn.Sequential):
        layout = find_layout(model)
        if layout is not None and not parts_of_sequences and getattr(model, "tokens_part", (0, 1))[1] == 1:
            return layout
        decoder = find_decoder(model, num_stages)
        if decoder is not None:
            _check_unchanged(model)
        return decoder
    patterns = getattr(model, "pipeline_layers", None) if layers is None else layers
    if patterns is None and type(model).forward is not nn.Sequential.forward:
        patterns = [name for name, _ in model.named_children()]
    names = [layer.name for layer in find_layers(model, patterns)]
    declared = layers is not None and hasattr(model, "pipeline_layers")
    in_order = runs_in_order(model, names)
    if in_order and (not declared or names == [layer.name for layer in find_layers(model, None)]):
        return None
    if parts_of_sequences:
        _check_unchanged(model)
        return None
    if type(model).forward is nn.Module.forward:
        return None
    if any(skips_of(model)):  # skips between layers belong to chains
        _check_unchanged(model)
        return None
    return Layout(
        "", tuple(names if patterns is None else [patterns] if isinstance(patterns, str) else patterns), "layers"
    )


def _check_unchanged(model: nn.Module) -> None:
    """Raises SplitError for hooks and replaced forwards of the modules around the layers, which chains do not run."""
    changed = "forward hooks" if model._forward_hooks or model._forward_pre_hooks else None
    changed = "a forward set on the instance" if "forward" in vars(model) else changed
    if changed is not None:
        raise SplitError(
            f"{type(model).__name__} has {changed}, which stages for parts of sequences do not run: another function "
            "would be trained. Remove it, or train on whole sequences."
        )


def _find_chain(
    model: nn.Module, layers: Sequence[str] | None, way: Decoder | Layout | None
) -> tuple[list[ChainLayer], Callable[[Sequence[ChainLayer]], nn.Module]]:
    """The layers of the model, and a function that builds a stage of some of them."""
    if isinstance(way, Layout):
        chain = find_layers(model, way.patterns)
        if way.declared == "layers":
            check_complete(model, chain, runs_others=True)
        order = [(name, counted) for name, _, counted in chain]

        def make_planned(piece: Sequence[ChainLayer]) -> nn.Module:
            with hooks_installed(model):
                return PlannedStage([(name, module) for name, module, _ in piece], model, order, way)

        return chain, make_planned
    chain = find_layers(model, way.layers if way else layers)
    check_complete(model, chain, replicated=way.shared if way else ())
    skips = skip_names((name, module) for name, module, _ in chain)

    def make_stage(piece: Sequence[ChainLayer]) -> nn.Module:
        named_modules = [(name, module) for name, module, _ in piece]
        if way:
            return DecoderStage(named_modules, model, way)
        return chain_stage(named_modules, [name for name, _, counted in piece if counted], skips)

    return chain, make_stage


def _given_stages(model: Any, num_stages: int | None = None) -> Stages:
    """Stages from a list of modules, one per stage. Raises SplitError if the model is not a list of `num_stages`."""
    _check_not_class("model", model)
    if isinstance(model, str | Mapping | Tensor) or not isinstance(model, Iterable):
        plain = model is None or isinstance(model, str | int | float)
        seen = f"={folded(model)}" if plain else f" is a {type(model).__name__}"
        raise SplitError(f"model{seen}: must be an nn.Module, or a list of modules, one per stage.")
    modules = list(model)
    for stage, module in enumerate(modules):
        _check_not_class(f"model[{stage}]", module)
        if not isinstance(module, nn.Module):
            seen = "None" if module is None else f"a {type(module).__name__}"
            raise SplitError(f"model[{stage}] is {seen}: must be an nn.Module.")
    if num_stages not in (None, len(modules)):
        raise SplitError(
            f"model is a list of {counted(len(modules), 'module')} for {counted(num_stages, 'stage')}: must have one "
            f"module per stage. Pass {counted(num_stages, 'module')}, or build the schedule for "
            f"{counted(len(modules), 'stage')} (ranks x chunks)."
        )
    tensors: dict[str, int] = {}
    named = [(name, t) for m in modules for name, t in (*m.named_parameters(), *m.named_buffers())]
    layers = [(str(index), module) for index, module in enumerate(modules)]
    skips = skip_names(layers)
    if skips or any(tensors.setdefault(name, id(tensor)) != id(tensor) for name, tensor in named):
        modules = [chain_stage([layer], None, skips) for layer in layers]
    parameters = [item for m in modules for item in m.named_parameters(remove_duplicate=False)]
    names = [tuple(name for name, _ in module.named_children()) or ("",) for module in modules]
    return _describe(modules, names, parameters)


def _check_not_class(name: str, given: Any) -> None:
    if isinstance(given, type):
        raise SplitError(f"{name}={given.__name__}: must be an nn.Module, not a class. Create an instance.")


def _describe(
    modules: list[nn.Module], layers: list[tuple[str, ...]], model: nn.Module | list[tuple[str, nn.Parameter]]
) -> Stages:
    """Assemble `Stages`, with the tied parameters: the same object under several names or in several stages.

    Args:
        modules: of the stages.
        layers: of the stages, by name.
        model: the uncut model, or without one the names of all parameters.
    """
    named = list(model.named_parameters(remove_duplicate=False)) if isinstance(model, nn.Module) else model
    aliases: dict[int, list[str]] = {}
    for name, parameter in dict.fromkeys(named):
        aliases.setdefault(id(parameter), []).append(name)
    homes: dict[int, list[int]] = {key: [] for key in aliases}
    for stage, module in enumerate(modules):
        for parameter in module.parameters():
            homes[id(parameter)].append(stage)
    objects = {id(parameter): parameter for _, parameter in named}
    check_memory((names[0], objects[key], homes[key]) for key, names in aliases.items())
    canonical = {alias: names[0] for names in aliases.values() for alias in names[1:]}
    for module in modules:
        if isinstance(module, StageModule):
            module.canonical_names = canonical
    return Stages(
        modules=modules,
        tied=tuple(TiedParameter(aliases[key][0], tuple(aliases[key]), (*at,)) for key, at in homes.items() if at[1:]),
        parameter_names=tuple(names[0] for names in aliases.values()),
        layers=tuple(layers),
        canonical_names=canonical,
        skips=find_skips(modules),
        whole=without_memory(model) if _is_of_transformers(model) else None,
        model=weakref.ref(model) if isinstance(model, nn.Module) else lambda: None,
        around=_around(model, modules) if isinstance(model, nn.Module) else AroundLayers.nothing(),
    )


def _around(model: nn.Module, modules: Sequence[nn.Module]) -> AroundLayers:
    plans = any(isinstance(module, PlannedStage) for module in modules)
    is_cut = any(isinstance(module, StageModule) for module in modules) and (len(modules) > 1 or not plans)
    return AroundLayers(model, modules, keeps_hooks=plans, runs_backward_hooks=not is_cut)


def _is_of_transformers(model: Any) -> TypeGuard[nn.Module]:
    """Whether a model is saved with a configuration: one of transformers, or one with adapters around it."""
    return isinstance(model, nn.Module) and hasattr(model, "save_pretrained") and hasattr(model, "config")
