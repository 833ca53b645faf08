"""A model that cannot be cut stays as it was, whichever layer is refused."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from pipeloom.parallel.placed import forget_block


@contextmanager
def unchanged_on_error(model: nn.Module) -> Iterator[None]:
    """If the block raises, put back the classes, modules, parameters, hooks and attributes of all modules of `model`.

    Values are not copied: the block replaces parameters, and does not write into them.
    """
    modules, parameters = list(model.modules()), list(model.parameters())
    kinds, attributes = [type(module) for module in modules], [dict(vars(module)) for module in modules]
    contents = [_contents(found) for found in attributes]
    try:
        yield
    except BaseException:
        for module, kind, found, held in zip(modules, kinds, attributes, contents, strict=True):
            module.__class__ = kind
            vars(module).clear()
            vars(module).update(found)
            for name, values in held.items():
                own = vars(module)[name]
                own.clear()
                own.update(values)
        for parameter in parameters:  # they had no blocks
            forget_block(parameter)
        raise


def _contents(attributes: dict[str, object]) -> dict[str, dict[object, object]]:
    """What a module's own tables of submodules, parameters, buffers and hooks hold."""
    tables = ("_modules", "_parameters", "_buffers")
    return {
        name: dict(value)
        for name, value in attributes.items()
        if isinstance(value, dict) and (name in tables or name.endswith(("_hooks", "_hooks_with_kwargs")))
    }
