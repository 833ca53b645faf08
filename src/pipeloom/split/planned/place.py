"""`StagePlace`: which parts of a model a stage has, and where they stand among all parts; `Leave`: how it ends."""

from collections.abc import Sequence

from pipeloom.errors import SplitError, one_line
from pipeloom.split.layouts.layout import Layout
from pipeloom.split.planned.tracking.origins import GRADIENT

_OTHER_WAYS = "trace the model with example= (Pipeline, split), {}, or use one stage"
_DECLARATIONS = {"layers": "name other layers", "its layout": "register another layout"}  # an order that did not fit


class Leave(BaseException):
    """Ends the forward of a stage behind its last part. Not an Exception, so that no model catches it."""

    def __init__(self, stage: object) -> None:
        super().__init__()
        self.stage = stage


class StagePlace:
    """The place of a stage in its model.

    Args:
        names: of the stage's parts.
        chain: names of all parts of the model, in order, and whether each is a repeated block.
        layout: where these come from.
        model_name: for messages.
        forward_is_set: whether the model's forward is one that was set on the instance.

    Attributes:
        names: of the stage's parts.
        places: name of a part -> its place in the model.
        elsewhere: names of the parts of other stages.
        blocks: names of the repeated parts.
        first, last: places of the stage's first and last part.
        is_alone: whether the model has no other stage.
        before: the name of the part before the first.
        end: the place of the model's last part.
        last_block: the place of the last repeated part.
        combines: whether the model may combine results of several stages behind its blocks, as two towers do.
        keeps_others: whether modules with parameters that are no parts run here: in front of the blocks or behind them.
        everywhere: names of modules that every stage has.
        stages: the stages of the model's parts, in order, or empty for a stage that is cut alone.
    """

    stages: Sequence[int] = ()

    def __init__(
        self,
        names: Sequence[str],
        chain: Sequence[tuple[str, bool]],
        layout: Layout,
        model_name: str,
        *,
        forward_is_set: bool,
    ) -> None:
        self.names = list(names)
        self.places = {name: place for place, (name, _) in enumerate(chain)}
        self.elsewhere = frozenset(self.places).difference(self.names)
        blocks = [name for name, is_block in chain if is_block]
        self.blocks = frozenset(blocks)
        self.first, self.last = (self.places[self.names[index]] for index in (0, -1))
        self.before = chain[self.first - 1][0] if self.first else None
        self.end = len(chain) - 1
        self.last_block = self.places[blocks[-1]]
        self.combines = len({self.list_of(name) for name in blocks}) > 1 or layout.declared == "layers"
        self.keeps_others = blocks[0] in self.names or self.last == self.end
        self.everywhere = layout.everywhere
        self.is_alone = not self.first and self.last == self.end
        self._declared, self.model = layout.declared, model_name
        self._forward_is_set = forward_is_set

    @staticmethod
    def list_of(name: str) -> str:
        """The list of modules that a part is in; of other parts, their own name."""
        home, _, key = name.rpartition(".")
        return home if key.isdigit() else name

    def is_ahead(self, key: str, name: str) -> bool:
        """Whether an attribute is of a part on a later stage than the part `name`, as far as the cut is known."""
        stages = self.stages or [place > self.last for place in self.places.values()]
        home = next((place for part, place in self.places.items() if key.startswith(f"{part}.")), None)
        return home is not None and stages[home] > stages[self.places[name]]

    def _cannot(self, problem: str, fix: str = "") -> SplitError:
        """The error for a model that stages cannot run: what is wrong, and a fix before those that always help."""
        ways = _OTHER_WAYS.format(_DECLARATIONS.get(self._declared, "declare its order with register_layout"))
        fixes = f"{fix}, {ways}" if fix else ways[0].upper() + ways[1:]
        return SplitError(f"{problem}. {fixes}.")

    def in_another_order(self, name: str) -> SplitError:
        """The error for a part that runs twice, or in another order."""
        return self._cannot(
            f"the forward of {self.model} runs {name!r} twice, in another order than {self._declared}, or without "
            "parts before it, as layerdrop does: stages run each part once"
        )

    def calls_inside(self, part: str, name: str) -> SplitError:
        """The error for a forward that calls a module inside of a part, in place of the part."""
        return SplitError(
            f"the forward of {self.model} calls {name!r}, inside of the layer {part!r}, itself: stages run whole "
            "layers. Name in layers= the modules that it calls, or use one stage."
        )

    def not_called(self, name: str) -> SplitError:
        """The error for a part that the forward did not call."""
        if self._forward_is_set:
            return SplitError(
                f"the forward that was set on {self.model} does not call {name!r}: where it calls the model's earlier "
                "forward, that runs on the whole model. Set one that takes the module, with types.MethodType(forward, "
                "model), and calls type(model).forward(module, ...)."
            )
        return self._cannot(
            f"the forward of {self.model} ended without calling {name!r}, which {self._declared} names as a part of "
            "the model",
            "Remove it from layers" if self._declared == "layers" else "Pass layers=",
        )

    def reads_earlier(self, absent: Sequence[str]) -> SplitError:
        """The error for a result that follows from zeros, some of them for `absent`."""
        if absent:
            return self._not_sent("computes its result with", absent[0])
        return self._cannot(
            f"the result of {self.model} reads what earlier stages computed, in addition to the result of "
            f"{self.names[0]!r} and later parts: it would be wrong",
            "" if self._declared == "layers" else "Pass layers=, with which results that skip stages are sent",
        )

    def decides_by_earlier(self, absent: Sequence[str]) -> SplitError:
        """The error for a forward that branches on a value which follows from zeros, some of them for `absent`."""
        if absent:
            return self._not_sent("branches between its layers on", absent[0])
        return self._cannot(
            f"the forward of {self.model} branches on a value that combines what several earlier stages compute: "
            "stages cannot exchange it",
            "Use a cut that keeps these parts together",
        )

    def argument_of_earlier(self, name: str, where: str, absent: Sequence[str]) -> SplitError:
        """The error for a part with an argument that follows from zeros, some of them for `absent`."""
        if absent:
            return self._not_sent(f"computes argument {where!r} of {name!r} with", absent[0])
        return self._cannot(
            f"{name!r} reads argument {where!r}, which combines what several earlier stages compute: stages cannot "
            "exchange it",
            "Use a cut that keeps these parts together",
        )

    def _not_sent(self, use: str, key: str) -> SplitError:
        """The error for a forward that uses an attribute of a later layer, or a gradient through earlier stages."""
        if key == GRADIENT:
            return SplitError(
                f"the forward of {self.model} {use} {key} through layers of other stages: a stage has the graph of "
                "its own layers alone. Move the call and the layers that it differentiates into one layer, use a cut "
                "that keeps them in one stage, or use one stage."
            )
        return SplitError(
            f"the forward of {self.model} {use} {key!r} of a later layer: stages send weights to later stages alone. "
            f"Make it a parameter of the model as well, which every stage has (self.shared = self.{_path(key)}, and "
            "self.shared in the forward), use a cut that keeps these layers together, or use one stage."
        )

    def raised_on_zeros(self, error: Exception) -> SplitError:
        """The error for code between parts of earlier stages that does not run on zeros."""
        return self._cannot(
            f"the forward of {self.model} runs into {one_line(error).rstrip('.')} before "
            f"{self.names[0]!r}, on the stage that begins there: for results of earlier stages it has zeros without a "
            "gradient",
            "Move such code into the layers",
        )

    def inside_function(self, name: str, function: str) -> SplitError:
        """The error for a part that runs inside a function which computes its gradient in its own way."""
        fix = "Call the layer itself"
        if "checkpoint" in function:
            fix = "Call the layer itself, and set recompute of the Pipeline"
        return self._cannot(
            f"the forward of {self.model} runs {name!r} inside of {function}, which computes gradients in its own way: "
            "it would cover the layers of one stage alone",
            fix,
        )

    def asks_type(self, call: str) -> SplitError:
        """The error for a forward that asks for the type of a stand-in."""
        return SplitError(
            f"the forward of {self.model} asks for {call}: stages have stand-ins of another class for layers. Use "
            "isinstance, or the layer's __class__."
        )

    def not_found(self, name: str) -> SplitError:
        """The error for a value that later stages read, and that this forward did not come to."""
        return self._cannot(
            f"the forward of {self.model} went another way than with earlier inputs of the same shapes: it did not "
            f"compute {name!r}, which later stages read"
        )

    def without_shape(self, module: str, error: Exception) -> SplitError:
        """The error for a module of another stage that does not say the shape of its result without values."""
        return SplitError(
            f"the shape of what a {module} of another stage returns is not known without values: "
            f"{one_line(error).split('. ')[0][:160]}. Stages that run the forward of {self.model} need it. Use a cut "
            "that keeps these layers and those that read them in one stage, one stage, or an nn.Sequential of such "
            "layers, which may also exchange PackedSequences."
        )

    def reads_all(self, method: str) -> SplitError:
        """The error for a forward that reads all parameters or modules."""
        call = {"named_parameters": "parameters", "named_modules": "modules"}.get(method, method)
        what = "modules" if method == "named_modules" else "parameters"
        return SplitError(
            f"the forward of {self.model} reads all its {what}, as {call}() gives them: a stage has its own only. Add "
            "such a term in the layers themselves, with pl.auxiliary_loss, or use one stage."
        )

    def changes_argument(self, name: str, where: str) -> SplitError:
        """The error for a part that changes one of its arguments in place."""
        return self._cannot(
            f"{name!r} changes its argument {where!r} in place and does not return it: stages do not exchange such "
            "changes",
            "Return the changed tensor",
        )

    def changes_result(self, part: str, name: str) -> SplitError:
        """The error for a part, or the forward, that changes a value in place that is also an earlier result."""
        return self._cannot(
            f"{part} changes the result of {name!r} in place, and later stages use this result as it was before",
            "Let it work on a copy (x = x.clone())",
        )

    def changes_copied(self, part: str, name: str) -> SplitError:
        """The error for a change in place of which an earlier result should have a part, and that is read later."""
        return self._cannot(
            f"{part} changes the result of {name!r} in place, where another module has returned its memory, and the "
            "forward uses it later: stages have copies of results",
            "Let it work on a copy (x = x.clone())",
        )

    def shares_rule(self, rule: str, name: str) -> str:
        """The warning for a gradient rule of the model's own between the parts, which several stages apply."""
        return (
            f"the forward of {self.model} applies {rule} to what follows from the result of {name!r} on several "
            "stages, whose backwards get a part of the gradient each. The sum is right where backward is linear, as "
            "derivatives are, and wrong for a rule such as clipping. Move it into a layer."
        )

    def reads_given_module(self, part: str, name: str) -> SplitError:
        """The error for a part that reads or calls a module of another stage, which is among its arguments."""
        return self._cannot(
            f"{part!r} reads {name!r} of another stage, through a module among its arguments: stages exchange tensors",
            "Give it the tensors themselves",
        )

    def sets_parameter(self, name: str) -> SplitError:
        """The error for a parameter of a part that the forward replaces."""
        return SplitError(
            f"the forward of {self.model} replaces the parameter {name!r}, as torch.func.functional_call does: stages "
            "run layers with their own parameters. Change it in the layer itself, or use one stage."
        )

    def sets_earlier(self, name: str) -> SplitError:
        """The error for an attribute of a part that the forward sets to what earlier stages compute."""
        return self._cannot(
            f"the forward of {self.model} sets {name!r} to what earlier stages compute: stages do not exchange "
            "attributes",
            "Pass it as an argument of the layer",
        )

    def shares_attribute(self, name: str) -> SplitError:
        """The error for a part that leaves a tensor in a dict or list which modules of other stages have too."""
        return self._cannot(
            f"{name!r} leaves a tensor in a dict or list that modules of other stages have as an attribute too: stages "
            "do not exchange it",
            "Pass it as an argument or result",
        )

    def loses_entries(self, name: str) -> SplitError:
        """The error for a dict or list with entries of earlier stages, which no part in front of this one is given."""
        return self._cannot(
            "layers of earlier stages left values in a dict or list among their arguments, and the forward of "
            f"{self.model} does not pass it to {name!r} or to the layer before",
            "Use another cut",
        )


def _path(key: str) -> str:
    """The attribute of a module as Python writes it: of "blocks.0.weight", "blocks[0].weight"."""
    first, *others = key.split(".")
    return first + "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in others)
