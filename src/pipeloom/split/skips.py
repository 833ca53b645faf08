"""Values that skip stages: what stage modules declare.

A module that is a stage hands values to later stages beside its output::

    class Encoder(nn.Module):
        stashes = ("features",)          # names of the values that it makes

        def forward(self, x):
            return self.pool(x), {"features": x}

    class Decoder(nn.Module):
        pops = ("features",)             # names of the values that it uses

        def forward(self, x, popped):       # called with popped=
            return self.join(torch.cat([x, popped["features"]], 1))

The values are tensors, or constants, tuples, lists and dicts as any value between stages. Several stages may pop one
name; its maker receives the sum of their gradients. The layers of a chain may declare them too.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from pipeloom.errors import RunError, SplitError, folded
from pipeloom.ir import SkippingValue
from pipeloom.split.stage_module import BlockRunner, StageModule, running


class SkippingStage(StageModule):
    """A stage of layers of which some stash or pop values.

    Args:
        layers, blocks: see `StageModule`.

    Attributes:
        stashes, pops: names of the values that its layers make for other stages, and use from earlier ones.
        kept: names of the values that its own layers use.
    """

    def __init__(self, layers: Iterable[tuple[str, nn.Module]], blocks: Iterable[str] | None = None) -> None:
        layers = list(layers)
        super().__init__(layers, blocks)
        made: list[str] = []
        pops: list[str] = []
        self.kept: set[str] = set()
        for _, layer in layers:
            for name in names_of(layer, "pops"):
                if name in made:
                    self.kept.add(name)
                elif name not in pops:
                    pops.append(name)
            made += names_of(layer, "stashes")
        self.stashes, self.pops = tuple(made), tuple(pops)

    def forward(self, value: Any, run: BlockRunner | None = None, popped: dict[str, Any] | None = None) -> Any:
        """Run the layers.

        Args:
            value, run: see `StageModule.forward`.
            popped: the values of `pops`.

        Returns:
            The output; with `stashes`, the output and the values by name.
        """
        kept = dict(popped or {})
        for index, (modules, key) in enumerate(self._chain):
            layer: Any = modules[key]
            running.layer = layer
            if self.observer is not None:
                self.observer.before(index)
            pops = names_of(layer, "pops")
            given = {"popped": {name: kept[name] for name in pops}} if pops else {}
            if run is None or not self._is_block[index]:
                value = layer(value, **given)
            else:
                value = run([layer], layer, value, **given)
            if names := names_of(layer, "stashes"):
                value, made = without_stashed(value, names)
                kept |= made
            if self.observer is not None:
                self.observer.after(index, value)
        return (value, {name: kept[name] for name in self.stashes}) if self.stashes else value


def chain_stage(layers: Iterable[tuple[str, nn.Module]], blocks: Iterable[str] | None = None) -> StageModule:
    """A stage of consecutive layers; see `StageModule`."""
    layers = list(layers)
    skips = any(names_of(layer, attribute) for _, layer in layers for attribute in ("stashes", "pops"))
    return (SkippingStage if skips else StageModule)(layers, blocks)


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
    for name, stage in list(makers.items()):
        if users[name]:
            continue
        maker = modules[stage]
        if isinstance(maker, SkippingStage) and name in maker.kept:
            maker.stashes = tuple(other for other in maker.stashes if other != name)
            del makers[name]
        else:
            raise SplitError(f"stage {stage} stashes {name!r}, and no later stage pops it. Remove it from its stashes.")
    return tuple(
        SkippingValue(name, maker, tuple(users[name]), name not in untrained) for name, maker in makers.items()
    )


def names_of(module: Any, attribute: str) -> tuple[str, ...]:
    """The names in `stashes` or `pops` of a stage or layer; none for a method of this name.

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
