"""The parts of a model of transformers without a plan, from its module tree: repeated blocks, and what is around them.

    embeddings                    a part, since it has parameters of its own
    encoder.layer.0 .. n          blocks: of one class or all recomputed as blocks, with a large part of the parameters
    block.0.0 .. block.3.n        blocks too, of lists in a list
    patch_embeddings.0, block.0.*, patch_embeddings.1, ..    where one loop runs several lists
    pooler, classifier            parts
    embed_tokens, used twice      no part: every stage has it
    a norm between the blocks     no part: every stage has it, since it may run behind any block

Containers call their modules in the order in which their forward names them. This is a guess. A forward that runs parts
in another order is refused in the first step.
"""

import ast
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

_LISTS = (nn.ModuleList, nn.Sequential)
_SHARE = 0.25  # of the largest list's parameters: smaller lists are no blocks


_RECOMPUTED = "GradientCheckpointingLayer"  # the class of blocks in transformers, also where they are of several kinds


class Parts(NamedTuple):
    """What a model consists of.

    Attributes:
        patterns: names of the parts in order; members of lists of blocks as ``*``.
        everywhere: names of the modules with parameters that every stage needs.
    """

    patterns: tuple[str, ...]
    everywhere: frozenset[str]


def detected_parts(model: nn.Module) -> Parts | None:
    """The parts of a model; None: it has no repeated blocks, or is none of transformers."""
    if not any(kind.__module__.startswith("transformers.") for kind in type(model).__mro__):
        return None
    lists = {name: sum(p.numel() for p in part.parameters()) for name, part in _lists(model, "")}
    largest = max(lists.values(), default=0)
    blocks = {name for name, size in lists.items() if size >= _SHARE * largest}
    if not blocks:
        return None
    found = list(_parts(model, "", blocks, _Shared(model)))
    return Parts(tuple(n for n, is_part in found if is_part), frozenset(n for n, is_part in found if not is_part))


class _Shared:
    """Which modules and parameters of a model occur in several places."""

    def __init__(self, model: nn.Module) -> None:
        modules = Counter(id(part) for _, part in model.named_modules(remove_duplicate=False))
        self._modules = {key for key, number in modules.items() if number > 1}
        holders = Counter(id(p) for part in model.modules() for p in part._parameters.values() if p is not None)
        self._parameters = {key for key, number in holders.items() if number > 1}

    def has(self, module: nn.Module) -> bool:
        own = [parameter for parameter in module.parameters() if id(parameter) not in self._parameters]
        return not own or id(module) in self._modules


def _lists(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """The outermost lists of modules that are blocks, with parameters."""
    if isinstance(module, _LISTS) and len(module) > 1 and _are_alike(module):
        if next(module.parameters(), None) is not None:
            yield name, module
        return
    for key, child in module._modules.items():
        if child is not None:
            yield from _lists(child, f"{name}.{key}" if name else key)


def _are_alike(modules: nn.ModuleList | nn.Sequential) -> bool:
    """Whether the members are of one class, or all are what transformers recomputes as a block."""
    kinds = {type(each) for each in modules}
    return len(kinds) == 1 or all(any(base.__name__ == _RECOMPUTED for base in kind.__mro__) for kind in kinds)


def _is_list(module: nn.Module) -> bool:
    """Whether a module has no forward of its own."""
    return type(module).forward is nn.Module.forward


def _blocks(module: nn.Module, name: str) -> Iterator[str]:
    """The pattern of the blocks in a list; of lists in a list, theirs in order."""
    if all(_is_list(each) for each in module.children()):
        for key, each in module._modules.items():
            if each is not None:
                yield from _blocks(each, f"{name}.{key}")
    else:
        yield f"{name}.*"


def _parts(module: nn.Module, name: str, blocks: set[str], shared: _Shared) -> Iterator[tuple[str, bool]]:
    """Names of modules, and whether each is a part; others are everywhere."""
    if name in blocks:
        yield from ((each, True) for each in _blocks(module, name))
        return
    prefix = f"{name}." if name else ""
    if not any(each.startswith(prefix) for each in blocks) and type(module).forward is not nn.Module.forward:
        if next(module.parameters(), None) is not None:
            yield name, not shared.has(module)
        return
    lists = {key for key in module._modules if prefix + key in blocks}
    ordered, together = _in_order(module, lists)
    for key, child, is_called in ordered:
        if key in together:
            if key == together[0]:
                yield from ((each, True) for each in _in_turn(module, prefix, together))
            continue
        inside = _parts(child, prefix + key, blocks, shared)
        # What the forward does not name is used in another way, such as a table that is read as a whole.
        yield from inside if is_called else ((each, is_part and "*" in each) for each, is_part in inside)


def _in_turn(module: nn.Module, prefix: str, lists: Sequence[str]) -> Iterator[str]:
    """The members of several lists in the order of a loop that runs one of each."""
    members: list[list[tuple[str, Any]]] = [list(module.get_submodule(key)._modules.items()) for key in lists]
    for turn in zip(*members, strict=True):
        for key, (place, member) in zip(lists, turn, strict=True):
            name = f"{prefix}{key}.{place}"
            yield from _blocks(member, name) if _is_list(member) else [name]


def _in_order(module: nn.Module, lists: set[str]) -> tuple[list[tuple[str, nn.Module, bool]], list[str]]:
    """The modules inside a container in the order in which its forward names them, and whether it does, outside of
    the loops over `lists`; and the lists that one loop runs in turn."""
    children = [(key, child) for key, child in module._modules.items() if child is not None]
    if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
        return [(key, child, True) for key, child in children], []
    uses = _Uses(module)
    try:
        uses.read(type(module).forward)
    except (OSError, TypeError, SyntaxError):
        return [(key, child, True) for key, child in children], []
    between = {name for names in uses.loops if lists & set(names) for name in names} - lists
    found, place = [], 0
    for key, child in children:
        place = uses.runs.get(key, uses.names.index(key)) if key in uses.names else place
        found.append((place, key, child, key in uses.names and key not in between))
    ordered = [(key, child, is_called) for _, key, child, is_called in sorted(found, key=lambda item: item[0])]
    return ordered, next((names for loop in uses.loops if (names := _together(module, loop, lists))), [])


def _together(module: nn.Module, loop: Iterable[str], lists: set[str]) -> list[str]:
    """The lists of one length that a loop names, where it does not run one list of blocks alone."""
    named = [name for name in dict.fromkeys(loop) if isinstance(module._modules.get(name), nn.ModuleList)]
    sizes = {name: len(module.get_submodule(name)._modules) for name in named}
    blocks = [name for name in named if name in lists]
    nested = any(_is_list(each) for name in blocks for each in module.get_submodule(name).children())
    if len(named) < 2 or not (len(blocks) > 1 or nested):
        return []
    return [name for name in named if sizes[name] == sizes[blocks[0]]]


class _Uses(ast.NodeVisitor):
    """The modules inside a container that its methods name, except to read a weight or bias.

    Attributes:
        names: of the modules, in the order of the source; those of methods where these are called.
        runs: of each module, where in `names` it may run first: not in a loop that only reads attributes of modules.
        loops: the names in each loop, in their order.
    """

    def __init__(self, module: nn.Module) -> None:
        self.names: list[str] = []
        self.runs: dict[str, int] = {}
        self.loops: list[list[str]] = []
        self._module, self._open, self._methods = module, set[int](), list[str]()
        self._only_read = False

    def read(self, function: Callable[..., Any]) -> None:
        """Add the names in a function's source."""
        source = inspect.getsource(inspect.unwrap(function))
        self.visit(ast.parse(f"if True:\n{source}" if source[0].isspace() else source))

    def visit_For(self, node: ast.For) -> None:
        self.loops.append([])
        here = len(self.loops) - 1
        self._open.add(here)
        before, self._only_read = self._only_read, self._only_read or not _runs_members(node)
        self.visit(node.iter)
        self._only_read = before
        for statement in (*node.body, *node.orelse):
            self.visit(statement)
        self._open.remove(here)

    def visit_Call(self, node: ast.Call) -> None:
        for argument in (*node.args, *node.keywords):  # these run before what is called
            self.visit(argument)
        self.visit(node.func)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        owner, name = node.value, node.attr
        if not (isinstance(owner, ast.Name) and owner.id == "self"):
            if not (name in ("weight", "bias") and isinstance(owner, ast.Attribute)):
                self.generic_visit(node)
            return
        method = getattr(type(self._module), name, None)
        if name in self._module._modules:
            if not self._only_read:
                self.runs.setdefault(name, len(self.names))
            self.names.append(name)
            for loop in self._open:
                self.loops[loop].append(name)
        elif (
            inspect.isfunction(method)
            and method.__module__ != "transformers.modeling_utils"
            and name not in self._methods
        ):
            self._methods.append(name)
            self.read(method)
            self._methods.pop()


def _runs_members(loop: ast.For) -> bool:
    """Whether a loop may run the modules that it iterates over: it calls them or modules inside, or hands them on."""
    counts = (
        isinstance(loop.iter, ast.Call) and isinstance(loop.iter.func, ast.Name) and loop.iter.func.id == "enumerate"
    )
    target = loop.target.elts[-1] if counts and isinstance(loop.target, ast.Tuple) else loop.target
    names = {each.id for each in ast.walk(target) if isinstance(each, ast.Name)}
    inside = [node for statement in loop.body for node in ast.walk(statement)]
    read = {id(node.value) for node in inside if isinstance(node, ast.Attribute)}
    if any(isinstance(node, ast.Name) and node.id in names and id(node) not in read for node in inside):
        return True
    calls = (_path(node.func) for node in inside if isinstance(node, ast.Call))
    return any(path[0] in names and not {"weight", "bias"} & set(path) for path in calls if path)


def _path(node: ast.expr) -> list[str]:
    """The names in an expression ``a.b.c``, empty for another one."""
    found: list[str] = []
    while isinstance(node, ast.Attribute | ast.Subscript):
        found += [node.attr] if isinstance(node, ast.Attribute) else []
        node = node.value
    return [node.id, *reversed(found)] if isinstance(node, ast.Name) else []
