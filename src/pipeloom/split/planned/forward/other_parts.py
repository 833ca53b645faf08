"""`OtherParts`: what happens where the model calls the parts of other stages in one forward of a planned stage."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from pipeloom.split.planned.collected import collector
from pipeloom.split.planned.containers import containers_of, has_tensors, shaped_like_result, zeros_like
from pipeloom.split.planned.forward.exploration import Exploration
from pipeloom.split.planned.forward.forward_run import ForwardRun
from pipeloom.split.planned.forward.known import RESULT
from pipeloom.split.planned.forward.other_modules import numbered
from pipeloom.split.planned.module_copies import with_zeros
from pipeloom.split.planned.place import Leave
from pipeloom.split.planned.tracking.forms import ALIKE, form_of_result, zeros_of
from pipeloom.split.planned.tracking.origins import EARLIER, LAST, LATER, OWN, tensors_of


class OtherParts:
    """The parts of other stages in one forward.

    Args:
        run: the forward.
    """

    def __init__(self, run: ForwardRun) -> None:
        self._run = run
        self._passed: set[str] = set()
        self._read: dict[str, Any] = {}  # attributes that arrived, as an exploring forward gets them
        self._of_forms: dict[str, Any] = {}  # zeros by the form of what parts of earlier stages returned
        self._of_later: dict[str, Any] = {}  # zeros by the first block of a later stage with a result of this form

    def read_absent(self, key: str, value: Any) -> Any:
        """What stands for an attribute of a module of another stage: what arrived, or zeros without memory for tensors.

        Args:
            key: fully qualified name of the attribute.
            value: as it was when the model was cut, without memory; an attribute that was absent may arrive too.
        """
        run = self._run
        received = run.extras.get(RESULT + key)
        if received is not None:
            if run.origins is not None and key not in self._read:
                self._read[key] = run.given(key, received, OWN)
            return self._read.get(key, received)
        before, now = run.stage.parameter_formats()
        device = next((leaf.device for leaf in tree_leaves(run.inputs) if isinstance(leaf, Tensor)), None)
        if isinstance(value, torch.device):
            return device if value.type == "meta" else value
        if isinstance(value, torch.dtype):
            return value if now is None or value != before else now
        if not has_tensors(value):
            return value
        if run.inside is not None:
            raise run.place.reads_given_module(run.inside, key)

        def zeros(tensor: Tensor) -> Tensor:
            dtype = now if now is not None and tensor.dtype == before else tensor.dtype
            return torch.zeros((), dtype=dtype, device=device).expand(tensor.shape)

        found = tree_map_only(Tensor, zeros, value)
        if run.origins is not None:
            run.origins.mark(found, EARLIER)
            if run.place.is_ahead(key, run.place.names[-1]):
                run.origins.mark_absent(key, found)
        return found

    def pass_other(self, name: str, twin: Any, args: tuple[Any, ...], settings: dict[str, Any]) -> Any:
        """What a module returns that is no part, and is on other stages: what arrived, or zeros."""
        run = self._run
        name = numbered(run, name)
        received = run.extras.get(RESULT + name)
        if received is not None:
            return run.given(name, received, OWN)
        if run.inside is not None:
            raise run.place.reads_given_module(run.inside, name)
        return self._zeros(twin, args, settings, EARLIER)

    def pass_earlier(self, name: str, twin: Any, args: tuple[Any, ...], settings: dict[str, Any]) -> Any:
        """What a part of an earlier stage returns: what arrived, or zeros."""
        run = self._run
        if run.done or name in self._passed:
            raise run.in_another_order(name)
        self._passed.add(name)
        if name == run.place.before:
            run.has_taken = True
            if "entries" in run.arrived:
                run.fill(containers_of(args, settings))
            found = collector()
            if found is not None:
                for key, values in run.arrived.get("collected", {}).items():
                    found[key] = list(values)
            return run.given(name, run.arrived["value"], OWN)
        if RESULT + name in run.extras:
            return run.given(name, run.extras[RESULT + name], OWN)
        return self._earlier(name, twin, args, settings)

    def pass_later(self, place: int, name: str, twin: Any, args: tuple[Any, ...], settings: dict[str, Any]) -> Any:
        """Where a part of a later stage is called: keeps what it reads and is sent, and returns zeros.

        Raises:
            Leave: nothing else is to be found.
        """
        run = self._run
        here, origins = run.place, run.origins
        if len(run.done) < len(here.names):
            raise run.in_another_order(name)
        entries = run.tensors_in_entries()
        for where, tensor in tensors_of(args, settings):
            if id(tensor) in entries:
                continue
            key = f"{name}|{where}"
            wanted = key in (run.sends if origins is None else run.extras)
            if origins is not None and not wanted:
                origin = origins.of_tensor(tensor)
                ahead = [key for key in origins.absent_in(origin) if here.is_ahead(key, name)]
                if ahead:
                    raise here.argument_of_earlier(name, where, ahead)
                wanted = bool(origin & OWN) or (bool(origin & LAST) and place > here.last + 1)
                if isinstance(run, Exploration) and (origin & LATER or origins.absent_in(origin)):
                    run.add_results_in(tensor)
                wanted = wanted and not origin & (LATER | EARLIER)
            if wanted:
                run.found[key] = run.extras.get(key, tensor)
        if origins is not None:
            self._add_later_entries(containers_of(args, settings))
        if origins is None:
            run.leave_if_complete()
        elif not here.combines and (place == here.end or place > here.last_block):
            raise Leave(run.stage)  # heads: their arguments follow from the result of the last block
        return self._later(name, twin, args, settings)

    def _add_later_entries(self, containers: dict[str, Any]) -> None:
        """Where parts leave values in a dict or list, a later part will too: what reads it reads these values."""
        for where, container in containers.items():
            zeros = {entry: self._marked(value, LATER) for entry, value in self._run.entries.get(where, {}).items()}
            if zeros and isinstance(container, list):
                container.append(zeros[max(zeros)])
            else:
                container.update(zeros)

    def _earlier(self, name: str, twin: Any, args: tuple[Any, ...], settings: dict[str, Any]) -> Any:
        """Zeros for what a part of an earlier stage returned, in the form that its stage has sent."""
        run = self._run
        form = run.forms.arrived.get(name, ALIKE)
        if form is None:
            return self._zeros(twin, args, settings, EARLIER)
        if form not in self._of_forms:
            value = run.arrived["value"]
            device = next((leaf.device for leaf in tree_leaves((value, run.inputs)) if isinstance(leaf, Tensor)), None)
            self._of_forms[form] = zeros_like(value) if form == ALIKE else zeros_of(form, device)
        found = self._of_forms[form]
        return found if run.origins is None else self._marked(found, EARLIER)

    def _later(self, name: str, twin: Any, args: tuple[Any, ...], settings: dict[str, Any]) -> Any:
        """Zeros for what a part of a later stage will return."""
        run = self._run
        if name not in run.place.blocks:
            return self._zeros(twin, args, settings, LATER)
        found = self._of_later_block(name, twin, args, settings)
        return found if run.origins is None else self._marked(found, LATER)

    def _of_later_block(self, name: str, twin: Any, args: tuple[Any, ...], settings: dict[str, Any]) -> Any:
        """A value in the form of what a block of a later stage will return.

        Blocks of the only list of a model return values of one form, as far as the stage needs it: at worst it does
        not find what they read, and they are refused. Of other blocks, the first forward asks each.
        """
        run, alike = self._run, self._run.stage.alike
        here = run.place
        is_sibling = here.list_of(here.names[-1]) == here.list_of(name)
        is_known = settings.get("past_key_values") is not None or (is_sibling and not here.combines)
        if is_known or (name not in alike and run.origins is None and not here.combines):
            return run.left
        like = alike.get(name, name)
        if like not in self._of_later:
            try:
                found = self._zeros(twin, args, settings, LATER, may_compute=not is_sibling)
            except Exception:
                if here.combines and not is_sibling:
                    raise
                found = zeros_like(run.left)
            if name not in alike:
                form = form_of_result(found)
                like = next((key for key, each in self._of_later.items() if form_of_result(each) == form), name)
                alike[name] = like
            self._of_later.setdefault(like, found)
        return self._of_later[like]

    def _zeros(
        self, twin: Any, args: tuple[Any, ...], settings: dict[str, Any], origin: int, *, may_compute: bool = True
    ) -> Any:
        """Zeros in the shapes of what a module of another stage returns; `may_compute`: with zeros for weights."""
        run = self._run
        origins = run.origins
        if origins is None:
            return self._shaped(twin, args, settings, may_compute)
        origins.quiet = True
        try:
            result = self._shaped(twin, args, settings, may_compute)
        except Exception as error:
            if run.explores:
                raise
            raise run.place.without_shape(type(twin).__name__, error) from error
        finally:
            origins.quiet = False
        origins.mark(result, origin)
        return result

    def _shaped(self, twin: Any, args: tuple[Any, ...], settings: dict[str, Any], may_compute: bool) -> Any:
        run = self._run
        # What the module would draw is drawn inside of a part of another stage.
        with nullcontext() if run.draws is None else run.draws.paused():
            try:
                return shaped_like_result(twin, args, settings, run.stage.parameter_formats())
            except Exception:
                found = _by_values(twin, args, settings) if may_compute else None
                if found is None:
                    raise
                return found

    def _marked(self, value: Any, origin: int) -> Any:
        """Zeros in the form of a value, in a forward that is followed."""
        origins = self._run.origins
        assert origins is not None
        origins.quiet = True
        result = zeros_like(value)
        origins.quiet = False
        origins.mark(result, origin)
        return result


def _by_values(twin: Any, args: tuple[Any, ...], settings: dict[str, Any]) -> Any:
    """Zeros in the shapes of what a module returns, where these depend on values: it computes, with weights of 0.

    None: they are not known by that either.
    """
    values = [leaf for leaf in tree_leaves((args, settings)) if isinstance(leaf, Tensor)]
    given = tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), (args, settings))
    devices = [each.device for each in values if each.device.type == "cuda"]
    if not values:
        return None
    try:
        with torch._C.DisableTorchFunction(), torch.no_grad(), torch.random.fork_rng(devices=devices):
            result = with_zeros(twin, values[0].device)(*given[0], **given[1])
    except Exception:
        return None
    only_tensors = all(isinstance(leaf, Tensor | None) for leaf in tree_leaves(result))
    return zeros_like(result) if only_tensors else None
