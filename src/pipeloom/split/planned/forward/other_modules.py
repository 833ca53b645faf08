"""One forward of a stage where the model calls or reads modules that are no parts, or inside of parts."""

from typing import Any

from torch import nn

from pipeloom.split.planned.containers import views_of
from pipeloom.split.planned.forward.forward_run import ForwardRun
from pipeloom.split.planned.forward.known import RESULT
from pipeloom.split.planned.tracking.origins import DRAWN, EARLIER, IN_UNIT, LAST, LATER, OWN


def numbered(run: ForwardRun, name: str) -> str:
    """The name of a module that is no part, with the number of its call behind the first one."""
    number = run.calls[name] = run.calls.get(name, 0) + 1
    return name if number == 1 else f"{name}#{number}"


def run_other(
    run: ForwardRun,
    module_name: str,
    module: Any,
    args: tuple[Any, ...],
    settings: dict[str, Any],
    *,
    is_inside: bool = False,
) -> Any:
    """Run a module that is no part. What follows from inputs alone need not be sent, if every stage computes it.

    Args:
        is_inside: it is inside of a part of this stage.
    """
    name = numbered(run, module_name)
    key = RESULT + name
    if key in run.extras:
        return run.given(name, run.extras[key], OWN)
    if run.draws is None:
        result = module(*args, **settings)
    else:
        result = _run_within(run, module_name, module, args, settings, is_inside)
    if run.origins is None:
        if key not in run.sends or key in run.found:
            return result
        run.found[key] = result
        run.leave_if_complete()
        return run.given(name, result, 0)
    known = run.origins.of(result)
    if known & (OWN | LAST) and not known & (LATER | EARLIER) and not run.origins.has_result(name):
        return run.given(name, result, known & (OWN | LAST))  # and not what it was computed of
    return result


def _run_within(
    run: ForwardRun, name: str, module: Any, args: tuple[Any, ...], settings: dict[str, Any], is_inside: bool
) -> Any:
    """Run a module that is no part and may draw, and note the origins of its result where they are followed."""
    origins, place, draws = run.origins, run.place, run.draws
    assert draws is not None
    if origins is None:
        with draws.within(name):
            return module(*args, **settings)
    has_parameters = next(module.parameters(), None) is not None
    given = origins.of((args, settings)) if has_parameters else 0
    was_quiet, origins.quiet = origins.quiet, origins.quiet or has_parameters
    with draws.within(name):
        result = module(*args, **settings)
    origins.quiet = was_quiet
    if has_parameters:
        has_blocks = bool(place.blocks & set(place.names))
        own = OWN if is_inside or (has_blocks and name not in place.everywhere) else 0
        origins.mark(result, given if given & ~(DRAWN | IN_UNIT) else given | own)
    return result


def read_own(run: ForwardRun, key: str, value: Any) -> Any:
    """An attribute of a module that not every stage has, with tensors, which the forward reads from outside."""
    if RESULT + key in run.sends:
        run.found[RESULT + key] = views_of(value)
    if run.origins is not None and not run.origins.has_result(key):
        run.origins.mark(value, OWN)
        run.origins.add_result(key, views_of(value), value)
    return value


def check_set(run: ForwardRun, name: str, home: nn.Module, key: str, value: Any) -> None:
    """Raises SplitError where the forward sets a parameter of a part, or sets an attribute to zeros."""
    if key in home._parameters:
        raise run.place.sets_parameter(name)
    if run.origins is not None and run.origins.of(value) & EARLIER:
        raise run.place.sets_earlier(name)
