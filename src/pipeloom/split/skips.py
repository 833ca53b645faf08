"""Values that skip stages: what stage modules declare to the runtime.

    stashes     names of the values that a stage makes for later stages: its forward returns ``(output, stashed)``
    pops        names of the values of earlier stages that it uses: its forward is called with ``popped=``

Both are dicts by name. Traced stages have them by themselves, stages of layers from their `skippable` layers. The
values are tensors, or constants, tuples, lists and dicts as any value between stages. Several stages may pop one name;
its maker receives the sum of their gradients.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Self

from torch import nn

from pipeloom.errors import RunError, SplitError, folded
from pipeloom.ir import SkippingValue
from pipeloom.split.skippable import Namespace, SkipKey, pairing_error, skip_values, skips_of
from pipeloom.split.stage_module import BlockRunner, StageModule, running


class SkippingStage(StageModule):
    """A stage of layers of which some are `skippable`.

    Args:
        layers, blocks: see `StageModule`.
        names: of all skips of the model.

    Attributes:
        stashes, pops: names of the values that its layers make for other stages, and use from earlier ones.
        kept: names of the values that its own layers use.
    """

    def __init__(
        self,
        layers: Iterable[tuple[str, nn.Module]],
        blocks: Iterable[str] | None,
        names: Mapping[SkipKey, str],
    ) -> None:
        layers = list(layers)
        super().__init__(layers, blocks)
        self._skips = tuple(LayerSkips.of(layer, names) for _, layer in layers)
        made = [name for skips in self._skips if skips for name in skips.stashes.values()]
        used = [name for skips in self._skips if skips for name in skips.pops.values()]
        self.kept = {*made} & {*used}
        self.stashes = tuple(name for name in made if name not in self.kept)
        self.pops = tuple(name for name in used if name not in self.kept)

    def forward(self, value: Any, run: BlockRunner | None = None, popped: dict[str, Any] | None = None) -> Any:
        """Run the layers.

        Args:
            value, run: see `StageModule.forward`.
            popped: the values of `pops`.

        Returns:
            The output; with `stashes`, the output and the values by name.
        """
        values = dict(popped or {})
        for index, (modules, key) in enumerate(self._chain):
            layer: Any = modules[key]
            running.layer = layer
            if self.observer is not None:
                self.observer.before(index)
            skips = self._skips[index]
            call, given = layer, {}
            if skips:
                call = partial(_with_skips, layer, skips)
                given = {"popped": {name: values.pop(name) for name in skips.pops.values()}}
            value = (
                call(value, **given) if run is None or not self._is_block[index] else run([layer], call, value, **given)
            )
            if skips:
                value, made = value
                values |= made
            if self.observer is not None:
                self.observer.after(index, value)
        return (value, {name: values[name] for name in self.stashes}) if self.stashes else value


class LayerSkips(NamedTuple):
    """The skips of a layer to and from other layers.

    Attributes:
        stashes, pops: key -> name in the model.
    """

    stashes: Mapping[SkipKey, str]
    pops: Mapping[SkipKey, str]

    @classmethod
    def of(cls, layer: nn.Module, names: Mapping[SkipKey, str]) -> Self | None:
        """The skips of a layer; None: it has none."""
        stashes, pops = skips_of(layer)
        if not stashes and not pops:
            return None
        inside = {*stashes} & {*pops}
        found = ({key: names[key] for key in keys if key not in inside} for keys in (stashes, pops))
        return cls(*found)


def _with_skips(layer: Callable[[Any], Any], skips: LayerSkips, value: Any, popped: Mapping[str, Any]) -> Any:
    """The output of a layer, and what it stashed by name."""
    values = {key: popped[name] for key, name in skips.pops.items()}
    with skip_values(values):
        output = layer(value)
    return output, {name: values[key] for key, name in skips.stashes.items()}


def skip_names(layers: Iterable[tuple[str, nn.Module]]) -> dict[SkipKey, str]:
    """The names of all skips between the layers of a model: the same in every process.

    Raises:
        SplitError: a skip that does not pair.
    """
    layers = list(layers)
    problem = pairing_error(layers)
    if problem is not None:
        raise SplitError(problem)
    names: dict[SkipKey, str] = {}
    spaces: dict[Namespace, int] = {}
    for _, layer in layers:
        for key in skips_of(layer)[0]:
            place = 0 if key.namespace is None else spaces.setdefault(key.namespace, len(spaces) + 1)
            names[key] = f"{key.name}#{place}" if place else key.name
    return names


def chain_stage(
    layers: Iterable[tuple[str, nn.Module]],
    blocks: Iterable[str] | None = None,
    names: Mapping[SkipKey, str] = MappingProxyType({}),
) -> StageModule:
    """A stage of consecutive layers; see `StageModule` and `SkippingStage`."""
    layers = list(layers)
    if any(any(skips_of(layer)) for _, layer in layers):
        return SkippingStage(layers, blocks, names)
    return StageModule(layers, blocks)


def find_skips(modules: Sequence[nn.Module]) -> tuple[SkippingValue, ...]:
    """The values that stages declare in `stashes` and `pops`. Names in `without_gradient` of the maker have none.

    Raises:
        SplitError: a name is stashed twice, never popped, or popped by its maker or an earlier stage.
    """
    makers: dict[str, int] = {}
    users: dict[str, list[int]] = {}
    untrained: set[str] = set()
    for stage, module in enumerate(modules):
        for name in names_of(module, "pops"):
            if name not in makers:
                raise SplitError(f"stage {stage} pops {name!r}: an earlier stage must stash it. Add it to its stashes.")
            users[name].append(stage)
        for name in names_of(module, "stashes"):
            if name in makers:
                raise SplitError(
                    f"stages {makers[name]} and {stage} both stash {name!r}: names must differ. Rename one."
                )
            makers[name], users[name] = stage, []
        untrained.update(getattr(module, "without_gradient", ()))
    unused = next((name for name in makers if not users[name]), None)
    if unused is not None:
        raise SplitError(
            f"stage {makers[unused]} stashes {unused!r}, and no later stage pops it. Remove it from its stashes."
        )
    return tuple(
        SkippingValue(name, maker, tuple(users[name]), name not in untrained) for name, maker in makers.items()
    )


def names_of(module: Any, attribute: str) -> tuple[str, ...]:
    """The names in `stashes` or `pops` of a stage; none for a method of this name.

    Raises:
        SplitError: the attribute is not a tuple of names.
    """
    names = getattr(module, attribute, ())
    if callable(names):
        return ()
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise SplitError(f"{type(module).__name__} has {attribute}={folded(names)}: must be a tuple of names.")
    return tuple(names)


def without_stashed(output: Any, names: Sequence[str]) -> tuple[Any, dict[str, Any]]:
    """The output of a module that stashes `names`, and the values.

    Raises:
        RunError: the module returned something else than the two.
    """
    if isinstance(output, tuple) and len(output) == 2 and isinstance(output[1], dict) and set(output[1]) == set(names):
        return output
    seen = f"a {type(output).__name__}"
    if isinstance(output, tuple) and output and isinstance(output[-1], dict):
        seen += f" with a dict of {folded(list(output[-1]))}"
    raise RunError(
        f"a module that stashes {folded(list(names))} returned {seen}: must return (output, stashed), with a dict of "
        "exactly these names."
    )
