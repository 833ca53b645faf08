"""Draw mutants: single changed operators in the rooms whose mistakes would be hardest to see."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import cosmic_ray.plugins
from cosmic_ray.ast import ast_nodes, get_ast_from_path
from cosmic_ray.mutating import mutate_code

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


@dataclass(frozen=True)
class Mutant:
    """One changed operator.

    Attributes:
        path: file, relative to the root of the tree.
        line: line of the operator, counted from 1.
        operator: cosmic-ray's name of the change.
        occurrence: which of the places in the file where that change applies.
    """

    path: str
    line: int
    operator: str
    occurrence: int

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
                places = [start for node in nodes for start, _ in operator.mutation_positions(node)]
                for occurrence, (line, _) in enumerate(places):
                    if "TYPE_CHECKING" not in lines[line - 1]:
                        mutant = Mutant(path.relative_to(root).as_posix(), line, name, occurrence)
                        found.setdefault(room, []).append(mutant)
    return found


def draw(root: Path, count: int, seed: int, rooms: tuple[str, ...] = ROOMS) -> list[Mutant]:
    """`count` mutants, at most one per line, from each room in proportion to the lines where it has any."""
    generator = random.Random(seed)
    by_line: dict[tuple[str, int], list[Mutant]] = {}
    for mutants in all_mutants(root, rooms).values():
        for mutant in mutants:
            by_line.setdefault((mutant.path, mutant.line), []).append(mutant)
    places = generator.sample(sorted(by_line), min(count, len(by_line)))
    return [generator.choice(by_line[place]) for place in places]
