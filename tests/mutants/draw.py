"""Draw mutants: single changed operators in the rooms whose mistakes would be hardest to see."""

from __future__ import annotations

import random
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import cosmic_ray.plugins
from cosmic_ray.ast import ast_nodes, get_ast_from_path
from cosmic_ray.mutating import mutate_code
from parso.tree import NodeOrLeaf

ROOMS = (
    "ir",
    "schedules",
    "passes",
    "sim",
    "plan",
    "engine",
    "transport",
    "parallel/data",
    "train/checkpoint",
)
_ARITHMETIC = ("Add", "Sub", "Mul", "Div", "FloorDiv", "Mod")
_COMPARISONS = ("Eq", "NotEq", "Lt", "LtE", "Gt", "GtE", "Is", "IsNot", "In", "NotIn")
_BOOLEAN = (
    "ReplaceAndWithOr",
    "ReplaceOrWithAnd",
    "ReplaceTrueWithFalse",
    "ReplaceFalseWithTrue",
    "AddNot",
    "ReplaceUnaryOperator_Delete_Not",
)
_SIGNATURES = ("parameters", "lambdef", "param")  # a bare * there is no product


@dataclass(frozen=True)
class Mutant:
    """One changed operator.

    Attributes:
        path: file, relative to the root of the tree.
        line: line of the operator, counted from 1.
        statement: first and last line of its statement.
        operator: cosmic-ray's name of the change.
        occurrence: which of the places in the file where that change applies.
    """

    path: str
    line: int
    statement: tuple[int, int]
    operator: str
    occurrence: int

    @property
    def name(self) -> str:
        return f"{self.path}:{self.line} {self.operator.removeprefix('core/')} {self.occurrence}"

    def source(self, text: str) -> str | None:
        """The mutated text of the file; None where the change applies nowhere."""
        return mutate_code(text, cosmic_ray.plugins.get_operator(self.operator)(), self.occurrence)


def operator_names() -> list[str]:
    """cosmic-ray's changes of comparisons, arithmetic and boolean operators."""
    wanted = {f"core/{name}" for name in _BOOLEAN}
    for family, kinds in (("ReplaceBinaryOperator", _ARITHMETIC), ("ReplaceComparisonOperator", _COMPARISONS)):
        wanted |= {f"core/{family}_{given}_{other}" for given in kinds for other in kinds}
    return [name for name in cosmic_ray.plugins.operator_names() if name in wanted]


def all_mutants(root: Path, rooms: tuple[str, ...] = ROOMS) -> dict[str, list[Mutant]]:
    """All mutants, by room. Statements that import for type checkers alone are left out."""
    operators = [(name, cosmic_ray.plugins.get_operator(name)()) for name in operator_names()]
    found: dict[str, list[Mutant]] = {}
    for room in rooms:
        for path in sorted((root / "src/pipeloom" / room).rglob("*.py")):
            lines = path.read_text(encoding="utf-8").splitlines()
            nodes = list(ast_nodes(get_ast_from_path(path)))
            for name, operator in operators:
                places = [(node, start) for node in nodes for start, _ in operator.mutation_positions(node)]
                for occurrence, (node, (line, _)) in enumerate(places):
                    if node.parent.type not in _SIGNATURES and "TYPE_CHECKING" not in lines[line - 1]:
                        mutant = Mutant(path.relative_to(root).as_posix(), line, _statement(node), name, occurrence)
                        found.setdefault(room, []).append(mutant)
    return found


def _statement(node: NodeOrLeaf) -> tuple[int, int]:
    """First and last line of the statement around a node; of a compound statement, of its head."""
    while node.parent.type not in ("suite", "file_input"):
        node = node.parent
    body = next((child for child in node.children if child.type == "suite"), node.get_last_leaf())
    return node.start_pos[0], body.start_pos[0]


def draw(root: Path, count: int, seed: int, rooms: tuple[str, ...] = ROOMS) -> list[Mutant]:
    """`count` mutants, at most one per line, from each room in proportion to the lines where it has any."""
    generator = random.Random(seed)
    by_line: dict[tuple[str, int], list[Mutant]] = {}
    for mutants in all_mutants(root, rooms).values():
        for mutant in mutants:
            by_line.setdefault((mutant.path, mutant.line), []).append(mutant)
    drawn: list[Mutant] = []
    for place in generator.sample(sorted(by_line), len(by_line)):
        mutant = generator.choice(by_line[place])
        # Not a "not" before a named expression, nor an "is" before a literal, of which Python warns.
        with suppress(SyntaxError), warnings.catch_warnings(action="error", category=SyntaxWarning):
            compile(mutant.source((root / mutant.path).read_text(encoding="utf-8")) or "", mutant.path, "exec")
            drawn.append(mutant)
        if len(drawn) == count:
            break
    return drawn
