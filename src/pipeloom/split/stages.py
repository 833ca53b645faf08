"""`split`: a model as a chain of stages that together hold exactly its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from pipeloom.errors import SplitError, folded
from pipeloom.split.huggingface import Decoder, DecoderStage, find_decoder
from pipeloom.split.layer_chain import Tie, find_ties
from pipeloom.split.layers import Layer, check_complete, count_layers, find_layers
from pipeloom.split.module import StageModule
from pipeloom.split.profile import LayerTime, LossFn, profile_layers


@dataclass(frozen=True)
class TiedParameter:
    """One parameter that lives in more than one stage.

    Attributes:
        name: its canonical name, the first that ``model.named_parameters()`` reports.
        names: all its fully qualified names.
        stages: the stages that hold it, ascending.
    """

    name: str
    names: tuple[str, ...]
    stages: tuple[int, ...]


@dataclass
class Stages:
    """A model cut into stages.

    Attributes:
        modules: one module a stage: ``forward(value)`` runs its layers; its state-dict keys are those of the model.
        tied: the parameters that live in more than one stage.
        parameter_names: canonical names in the order of ``model.named_parameters()``, each tied parameter once.
        layers: for each stage, the fully qualified names of its layers.
        canonical_names: for every other name of a tied parameter, the canonical one.
    """

    modules: list[nn.Module]
    tied: tuple[TiedParameter, ...]
    parameter_names: tuple[str, ...]
    layers: tuple[tuple[str, ...], ...]
    canonical_names: dict[str, str] = field(default_factory=dict)


def split(
    model: nn.Module | Sequence[nn.Module],
    num_stages: int,
    *,
    layers: Sequence[str] | None = None,
    cut: str | Sequence[int] = "layers",
    sample: Any = None,
    loss_fn: LossFn | None = None,
) -> Stages:
    """Cut `model` into `num_stages` contiguous stages.

    Args:
        model: an nn.Sequential (its children are the layers), a model with `layers`, a Hugging Face decoder (see
            `pipeloom.split.huggingface`), or a list of modules, one a stage, which is taken as it is (names that two
            of its modules share get the position in front).
        num_stages: how many stages.
        layers: fully qualified names of the modules that run one after another, such as
            ``["embedding", "blocks.*", "norm", "head"]``; a ``*`` stands for all members of a list. By default the
            model's attribute ``pipeline_layers``, if it has one.
        cut: what to balance. "layers": the number of layers; where some come from a ``*``, those count and single
            names ride along, the first with the first stage and the last with the last. "parameters": their numbers,
            tied ones once in each stage that has them. "time": measured forward and backward on `sample`. A list: how
            many layers (or counted layers) each stage gets; 0 leaves the first or last stage only the single names.
        sample: for "time", the input of one micro-batch; with `loss_fn`, the pair (inputs, targets).
        loss_fn: for "time", ``loss_fn(output, targets)``, counted to the last layer.

    The stages hold the model's own modules, nothing is copied. A module may run in several places.

    Raises:
        SplitError: an unknown name, more stages than layers, counts that do not add up, a parameter or persistent
            buffer of the model that would be in no stage.
    """
    if not isinstance(num_stages, int) or num_stages < 1:
        raise SplitError(f"num_stages={num_stages!r}: a model has at least one stage; ask for 1 or more")
    if not isinstance(model, nn.Module):
        return _given_stages(_listed(model), num_stages)
    named = layers is not None or hasattr(model, "pipeline_layers")
    decoder = None if named else find_decoder(model, num_stages)
    whole = num_stages == 1 and not named and decoder is None
    if whole and not isinstance(model, nn.Sequential):  # nothing to cut, so nothing needs to be known of its inside
        return _describe([model], [("",)], list(model.named_parameters(remove_duplicate=False)))
    chain, make_stage = _find_chain(model, layers, decoder)
    counts = count_layers(chain, num_stages, cut, sample, loss_fn, make_stage)
    pieces: list[list[Layer]] = []
    first = 0
    for count in counts:
        pieces.append(chain[first : first + count])
        first += count
    modules = [make_stage(piece) for piece in pieces]
    for module in modules:
        module.training = model.training  # of the stage alone: its layers keep the mode that each has
    names = [tuple(layer.name for layer in piece) for piece in pieces]
    return _describe(modules, names, list(model.named_parameters(remove_duplicate=False)))


def profile_model(
    model: nn.Module | Sequence[nn.Module],
    sample: Any,
    *,
    layers: Sequence[str] | None = None,
    loss_fn: LossFn | None = None,
    num_warmups: int = 2,
    num_rounds: int = 5,
) -> tuple[list[LayerTime], list[Tie]]:
    """Measure every layer of a model that `split` can cut, each run as a stage of its own (see `profile_layers`).

    Args:
        model: as for `split`; of a list of modules, each is one layer.
        sample: the input of one micro-batch; with `loss_fn`, the pair (inputs, targets).
        layers: as for `split`.
        loss_fn: its time is added to the last layer's.
        num_warmups: rounds that are not counted.
        num_rounds: rounds of which the median is taken.

    Returns:
        The layers' times and sizes, and the bytes of weights that several of them share:
        ``Profile.of(*profile_model(model, sample))`` is what `pipeloom.plan.partition` reads.

    Raises:
        SplitError: the model cannot be cut into layers, or has no values.
    """
    if isinstance(model, nn.Module):
        named = layers is not None or hasattr(model, "pipeline_layers")
        chain, make_stage = _find_chain(model, layers, None if named else find_decoder(model, num_stages=2))
        modules = [(layer.name, make_stage([layer])) for layer in chain]
    else:
        given = _listed(model)
        modules = [(str(index), module) for index, module in enumerate(_given_stages(given, len(given)).modules)]
    times = profile_layers(modules, sample, loss_fn=loss_fn, num_warmups=num_warmups, num_rounds=num_rounds)
    return times, find_ties([{id(p): p.nbytes for p in module.parameters()} for _, module in modules])


def _find_chain(
    model: nn.Module, layers: Sequence[str] | None, decoder: Decoder | None
) -> tuple[list[Layer], Callable[[Sequence[Layer]], nn.Module]]:
    """The model's layers, all that it needs, and what makes a stage of some of them."""
    chain = find_layers(model, decoder.layers if decoder else layers)
    check_complete(model, chain, beside=decoder.shared if decoder else ())

    def make_stage(piece: Sequence[Layer]) -> nn.Module:
        named_modules = [(name, module) for name, module, _ in piece]
        if decoder:
            return DecoderStage(named_modules, model, decoder)
        return StageModule(named_modules, [name for name, _, counted in piece if counted])

    return chain, make_stage


def _listed(model: Any) -> list[nn.Module]:
    """The stages of a model that is no module. Raises SplitError where it is no list of modules either."""
    if isinstance(model, type):
        raise SplitError(f"the model is the class {model.__name__}: a model is an object of a class; make one")
    if isinstance(model, str | Mapping | Tensor) or not isinstance(model, Iterable):
        plain = model is None or isinstance(model, str | int | float)
        raise SplitError(
            f"the model is {folded(model) if plain else f'a {type(model).__name__}'}: it is an nn.Module, or a "
            "list of modules, one a stage; pass one"
        )
    modules = list(model)
    for stage, module in enumerate(modules):
        if isinstance(module, type):
            raise SplitError(f"stage {stage} of the list is the class {module.__name__}: it is an nn.Module; make one")
        if not isinstance(module, nn.Module):
            seen = "None" if module is None else f"a {type(module).__name__}"
            raise SplitError(f"stage {stage} of the list is {seen}: each is an nn.Module; wrap it in one")
    return modules


def _given_stages(modules: list[nn.Module], num_stages: int) -> Stages:
    """A model that comes as one module a stage."""
    if len(modules) != num_stages:
        raise SplitError(
            f"a list of {len(modules)} stages for num_stages={num_stages}: the list is the cut; use {len(modules)}"
        )
    seen: dict[str, int] = {}
    named = [(name, t) for m in modules for name, t in (*m.named_parameters(), *m.named_buffers())]
    if any(seen.setdefault(name, id(tensor)) != id(tensor) for name, tensor in named):
        modules = [StageModule([(str(index), module)]) for index, module in enumerate(modules)]
    parameters = [item for m in modules for item in m.named_parameters(remove_duplicate=False)]
    names = [tuple(name for name, _ in module.named_children()) or ("",) for module in modules]
    return _describe(modules, names, parameters)


def _describe(modules: list[nn.Module], layers: list[tuple[str, ...]], named: list[tuple[str, nn.Parameter]]) -> Stages:
    """Find what is tied: the same parameter object under several names, in several stages."""
    aliases: dict[int, list[str]] = {}
    for name, parameter in named:
        names = aliases.setdefault(id(parameter), [])
        if name not in names:
            names.append(name)
    homes: dict[int, list[int]] = {key: [] for key in aliases}
    for stage, module in enumerate(modules):
        for parameter in module.parameters():
            homes[id(parameter)].append(stage)
    canonical = {alias: names[0] for names in aliases.values() for alias in names[1:]}
    for module in modules:
        if isinstance(module, StageModule):
            module.canonical_names = canonical
    return Stages(
        modules=modules,
        tied=tuple(
            TiedParameter(names[0], tuple(names), tuple(homes[key]))
            for key, names in aliases.items()
            if len(homes[key]) > 1
        ),
        parameter_names=tuple(names[0] for names in aliases.values()),
        layers=tuple(layers),
        canonical_names=canonical,
    )
