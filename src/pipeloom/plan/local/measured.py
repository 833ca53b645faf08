"""`Measured`: what `pipeloom doctor --measure` found on a machine, as tables. No torch here.

    {"version": 1, "date": "2026-05-04 12:30", "machine": "node7", "cores": 8, "torch": "2.10.0",
     "rates": [{"processes": 8, "threads": 1,
                "products": {"fp32": [[rows, columns, inner, seconds], ...]},
                "curves": {"elementwise": [[bytes, seconds], ...], ...},
                "seconds": {"kernel": 3e-6, ...}}, ...]}

`rates` has one entry for each number of processes that computed side by side. Between the entries of a table, times are
interpolated; beyond them, rates stay those of the last entry.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import pairwise, product
from typing import Any, Self

from pipeloom.common.json_reader import Entry
from pipeloom.errors import InputError

VERSION = 1
FORMATS = ("fp32", "bf16")
CURVES = (  # tables of [size, seconds]
    "elementwise",  # bytes read and written by one kernel
    *(f"attention {way} {kind}" for kind in FORMATS for way in ("forward", "backward")),  # operations of the forward
    "update",  # parameters: norm, clipping and AdamW of one step
    "message",  # bytes, from one process to another
    "all_reduce",  # bytes, between all processes
    "all_gather",
)
SECONDS = (
    "kernel",  # of a kernel on next to nothing
    "block forward",  # of a block beyond its kernels: Python, autograd
    "block backward",
    "stage forward",  # of a stage beside its layers
    "stage backward",
    "step",  # of a step beside its computations, messages and update
    "send",  # that a message keeps its sender busy
    "receive",  # and its receiver
    "collectives",  # cores that a process uses during a collective
    "crowding",  # slowdown of processes that take turns, beside that each has a part of a core only
)
Curve = tuple[tuple[float, float], ...]
Products = tuple[tuple[float, float, float, float], ...]


def interpolated(curve: Sequence[tuple[float, float]], size: float) -> float:
    """Seconds for `size`: between neighbours by powers, below the first as the first, beyond the last in proportion."""
    if size <= curve[0][0]:
        return curve[0][1]
    last, most = curve[-1]
    if size >= last:
        return most * size / last
    index = bisect_right(curve, size, key=lambda entry: entry[0])
    (a, low), (b, high) = curve[index - 1], curve[index]
    part = math.log(size / a) / math.log(b / a)
    return math.exp(math.log(low) + part * math.log(high / low))


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Times with `processes` of them side by side, each with `threads`.

    Attributes:
        processes, threads: their numbers.
        products: by number format, products of matrices on a full grid of sizes.
        curves: by name of `CURVES`; messages and collectives need several processes.
        seconds: by name of `SECONDS`.
    """

    processes: int
    threads: int
    products: Mapping[str, Products] = field(default_factory=dict)
    curves: Mapping[str, Curve] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)

    def curve(self, name: str, size: float) -> float:
        """Seconds of one table; 0 where it was not measured."""
        found = self.curves.get(name)
        return interpolated(found, size) if found else 0.0

    def second(self, name: str) -> float:
        """The measured seconds of one of `SECONDS`; 0 where it was not measured."""
        return self.seconds.get(name, 0.0)

    def product_seconds(self, kind: str, rows: float, columns: float, inner: float) -> float:
        """Seconds of a product [rows, inner] x [inner, columns] in the number format `kind`."""
        sizes, rates = self._grids[kind]
        return 2 * rows * columns * inner / _of_grid(sizes, rates, (rows, columns, inner))

    @cached_property
    def _grids(self) -> dict[str, tuple[tuple[float, ...], dict[tuple[int, ...], float]]]:
        """By format: the sizes along each side, and the logarithm of the rate at their numbers."""
        found: dict[str, tuple[tuple[float, ...], dict[tuple[int, ...], float]]] = {}
        for kind, rows in self.products.items():
            sizes = tuple(sorted({row[0] for row in rows}))
            at = {size: number for number, size in enumerate(sizes)}
            found[kind] = (
                sizes,
                {(at[a], at[b], at[c]): math.log(2 * a * b * c / seconds) for a, b, c, seconds in rows},
            )
        return found


def _of_grid(
    sizes: tuple[float, ...], rates: Mapping[tuple[int, ...], float], point: tuple[float, float, float]
) -> float:
    """The rate at a point, interpolated between the corners around it; sizes outside count as the outermost ones."""
    lower, parts = [], []
    for size in point:
        index = min(max(bisect_right(sizes, size) - 1, 0), len(sizes) - 2)
        part = math.log(size / sizes[index]) / math.log(sizes[index + 1] / sizes[index])
        lower.append(index)
        parts.append(min(1.0, max(0.0, part)))
    log = 0.0
    for corner in product((0, 1), repeat=3):
        weight = math.prod(part if up else 1 - part for up, part in zip(corner, parts, strict=True))
        if weight:
            log += weight * rates[tuple(index + up for index, up in zip(lower, corner, strict=True))]
    below = math.prod(min(1.0, size / sizes[0]) for size in point)  # a smaller product takes no less time
    return math.exp(log) * below


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Tables of one machine.

    Attributes:
        date: of the measurement, local time.
        machine: its name.
        cores: that processes may use.
        torch: its version.
        rates: ascending by processes.
    """

    date: str
    machine: str
    cores: int
    torch: str
    rates: tuple[Rates, ...]

    def of(self, processes: int) -> Rates:
        """The entry for a number of processes, of at most one for each core: more processes take turns."""
        wanted = min(processes, self.cores)
        return next((each for each in self.rates if each.processes >= wanted), self.rates[-1])

    def crowding(self, processes: int) -> float:
        """Slowdown of processes that take turns, beside that each has a part of a core only."""
        more = [each for each in self.rates if each.processes > self.cores]
        return more[0].seconds.get("crowding", 1.0) if more and processes > self.cores else 1.0

    def to_mapping(self) -> dict[str, Any]:
        """The measurement as a JSON object; `read_measured` reads it back."""
        return {"version": VERSION, **asdict(self)}

    @classmethod
    def read(cls, entry: Entry) -> Self:
        """The inverse of `to_mapping`.

        Raises:
            InputError: another version, or a wrong value; the message names the key and the rule.
        """
        values = entry.fields(("version", "date", "machine", "cores", "torch", "rates"))
        if values["version"].whole() != VERSION:
            values["version"].refuse(f"this release reads version {VERSION}", "Run `pipeloom doctor --measure` again")
        rates = tuple(_rates(each) for each in values["rates"].members())
        if not rates:
            raise InputError(f"{values['rates'].place}=[]: must have an entry. Run `pipeloom doctor --measure` again.")
        cores = values["cores"].whole(least=1)
        for each, tables in zip(values["rates"].members(), rates, strict=True):
            if tables.processes <= cores:
                each.fields(_RATES)["products"].fields(FORMATS)
        return cls(
            **{name: values[name].text() for name in ("date", "machine", "torch")},
            cores=cores,
            rates=tuple(sorted(rates, key=lambda each: each.processes)),
        )


_RATES = ("processes", "threads", "products", "curves", "seconds")
_TOGETHER = {"curves": ("all_gather", "message"), "seconds": ("send", "receive")}  # of entries with all_reduce


def _rates(entry: Entry) -> Rates:
    values = entry.fields(_RATES)
    products = values["products"].fields((), FORMATS)
    curves = values["curves"].fields((), CURVES)
    seconds = values["seconds"].fields((), SECONDS)
    for part, names in _TOGETHER.items() if "all_reduce" in curves else ():
        values[part].fields(names, CURVES if part == "curves" else SECONDS)
    return Rates(
        processes=values["processes"].whole(least=1),
        threads=values["threads"].whole(least=1),
        products={kind: _grid(rows) for kind, rows in products.items()},
        curves={name: _curve(rows) for name, rows in curves.items()},
        seconds={name: each.number() for name, each in seconds.items()},
    )


def _row(entry: Entry, length: int) -> tuple[float, ...]:
    return tuple(each.number(above=True) for each in entry.members(length=length))


def _curve(entry: Entry) -> Curve:
    rows: Any = tuple(_row(row, 2) for row in entry.members())
    if any(a[0] >= b[0] for a, b in pairwise(rows)):
        entry.refuse("sizes must ascend", "Run `pipeloom doctor --measure` again")
    found: Curve = rows
    return found


def _grid(entry: Entry) -> Products:
    rows: Any = tuple(_row(row, 4) for row in entry.members())
    sides = [{row[side] for row in rows} for side in range(3)]
    if (
        not rows
        or len(sides[0]) < 2
        or sides[1:] != sides[:1] * 2
        or len({row[:3] for row in rows}) != len(sides[0]) ** 3
    ):
        entry.refuse("must have every combination of at least two sizes", "Run `pipeloom doctor --measure` again")
    found: Products = rows
    return found
