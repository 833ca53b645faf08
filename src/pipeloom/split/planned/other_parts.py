"""`OtherParts`: what happens where the model calls the parts of other stages in one forward of a planned stage."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pipeloom.split.planned.collected import collector
from pipeloom.split.planned.containers import containers_of
from pipeloom.split.planned.forward_run import ForwardRun
from pipeloom.split.planned.known import RESULT
from pipeloom.split.planned.place import Leave
from pipeloom.split.planned.stand_ins import shaped_like_result, zeros_like
from pipeloom.split.planned.tracking.origins import EARLIER, LAST, LATER, OWN, tensors_of


class OtherParts:
    """The parts of other stages in one forward.

    Args:
        run: the forward.
    """

    def __init__(self, run: ForwardRun) -> None:
        self._run = run
        self._passed: set[str] = set()
        self._forms: dict[str, Any] = {}  # of what blocks of other stages return, by list

    def read_absent(self, key: str, tensor: Tensor) -> Tensor:
        """What stands for a tensor of a module of another stage: the received one, or zeros without memory."""
        run = self._run
        received = run.extras.get(RESULT + key)
        if isinstance(received, Tensor):
            return received if run.origins is None else run.given(key, received, OWN)
        before, now = run.stage.parameter_formats()
        device = next((leaf.device for leaf in tree_leaves(run.inputs) if isinstance(leaf, Tensor)), None)
        dtype = now if now is not None and tensor.dtype == before else tensor.dtype
        zeros = torch.zeros((), dtype=dtype, device=device).expand(tensor.shape)
        if run.origins is not None:
            run.origins.mark(zeros, EARLIER)
        return zeros

    def pass_other(self, name: str, twin: Any, args: tuple[Any, ...], settings: dict[str, Any]) -> Any:
        """What a module returns that is no part, and is on other stages: what arrived, or zeros."""
        run = self._run
        received = run.extras.get(RESULT + name)
        return self._zeros(twin, args, settings, EARLIER) if received is None else run.given(name, received, OWN)

    def pass_earlier(self, name: str, twin: Any, args: tuple[Any, ...], settings: dict[str, Any]) -> Any:
        """What a part of an earlier stage returns: what arrived, or zeros."""
        run = self._run
        if run.done or name in self._passed:
            raise run.place.in_another_order(name)
        self._passed.add(name)
        if name == run.place.before:
            if "entries" in run.arrived:
                run.fill(containers_of(args, settings))
            found = collector()
            if found is not None:
                for key, values in run.arrived.get("collected", {}).items():
                    found[key] = list(values)
            return run.given(name, run.arrived["value"], OWN)
        if RESULT + name in run.extras:
            return run.given(name, run.extras[RESULT + name], OWN)
        return self._absent(name, twin, (args, settings), EARLIER)

    def pass_later(self, place: int, name: str, twin: Any, args: tuple[Any, ...], settings: dict[str, Any]) -> Any:
        """Where a part of a later stage is called: keeps what it reads and is sent, and returns zeros.

        Raises:
            Leave: nothing else is to be found.
        """
        run = self._run
        here, origins = run.place, run.origins
        if len(run.done) < len(here.names):
            raise here.in_another_order(name)
        for where, tensor in tensors_of(args, settings):
            key = f"{name}|{where}"
            wanted = key in (run.sends if origins is None else run.extras)
            if origins is not None and not wanted:
                origin = origins.of_tensor(tensor)
                wanted = bool(origin & OWN) or (bool(origin & LAST) and place > here.last + 1)
                if origin & LATER:
                    run.add_results_in(tensor)
                wanted = wanted and not origin & (LATER | EARLIER)
            if wanted:
                run.found[key] = run.extras.get(key, tensor)
        if origins is not None:
            self._add_later_entries(containers_of(args, settings))
        if origins is None:
            if place == here.end or len(run.found) == len(run.sends):
                raise Leave(run.stage)
        elif not here.combines and (place == here.end or place > here.last_block):
            raise Leave(run.stage)  # heads: their arguments follow from the result of the last block
        return self._absent(name, twin, (args, settings), LATER)

    def _add_later_entries(self, containers: dict[str, Any]) -> None:
        """Where parts leave values in a dict or list, a later part will too: what reads it reads these values."""
        for where, container in containers.items():
            zeros = {entry: self._marked(value, LATER) for entry, value in self._run.entries.get(where, {}).items()}
            if zeros and isinstance(container, list):
                container.append(zeros[max(zeros)])
            else:
                container.update(zeros)

    def _absent(self, name: str, twin: Any, call: tuple[tuple[Any, ...], dict[str, Any]], origin: int) -> Any:
        """Zeros for what a part of another stage returns; blocks of one list return values of one form."""
        run = self._run
        here, (args, settings) = run.place, call
        if name not in here.blocks:
            return self._zeros(twin, args, settings, origin)
        siblings = here.list_of(name)
        if siblings not in self._forms:
            like, form = (here.names[-1], run.left) if origin == LATER else (here.before, run.arrived["value"])
            one_list = not here.combines or (like is not None and here.list_of(like) == siblings)
            if one_list or settings.get("past_key_values") is not None:
                self._forms[siblings] = form if origin == LATER else zeros_like(form)
            else:
                self._forms[siblings] = self._zeros(twin, args, settings, origin)
        form = self._forms[siblings]
        return form if run.origins is None else self._marked(form, origin)

    def _zeros(self, twin: Any, args: tuple[Any, ...], settings: dict[str, Any], origin: int) -> Any:
        """Zeros in the shapes of what a module of another stage returns."""
        run = self._run
        origins, formats = run.origins, run.stage.parameter_formats()
        if origins is None:
            # What the module would draw is drawn inside of a part of another stage.
            with nullcontext() if run.draws is None else run.draws.paused():
                return shaped_like_result(twin, args, settings, formats)
        origins.quiet = True
        try:
            with nullcontext() if run.draws is None else run.draws.paused():
                result = shaped_like_result(twin, args, settings, formats)
        except Exception as error:
            if run.explores:
                raise
            raise run.place.without_shape(type(twin).__name__, error) from error
        origins.quiet = False
        origins.mark(result, origin)
        return result

    def _marked(self, value: Any, origin: int) -> Any:
        """Zeros in the form of a value, in a forward that is followed."""
        origins = self._run.origins
        assert origins is not None
        origins.quiet = True
        result = zeros_like(value)
        origins.quiet = False
        origins.mark(result, origin)
        return result
