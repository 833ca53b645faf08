"""The answer of a search for people: a table, where the time goes, and why others lost. No torch here."""

from collections.abc import Mapping, Sequence, Set
from itertools import groupby
from math import inf
from typing import Any

from pipeloom.common.quantities import bytes_text, counted, number_text, percent_text, plural, seconds_text, table_lines
from pipeloom.plan.search.best_first import Answer

Row = Mapping[str, Any]  # a plan of ``--json``
_NAMES = {
    "compute": "computing",
    "recompute": "recomputing",
    "tensor": "tensor-parallel collectives",
    "context": "context-parallel collectives",
    "expert": "expert-parallel collectives",
    "pipeline": "bubble and messages",
    "data": "data-parallel collectives",
    "optimizer": "optimizer",
}
_DEGREES = {"dp": "data", "pp": "pipeline", "cp": "context", "tp": "tensor"}
_RESULTS = ("", "step", "MFU", "peak")  # columns that do not say what a plan is
_APART = ("blocks", "mesh axes", "context kind")  # columns for plans that look alike in all others
_MOST_RUNS = 8  # of stages with the same number of blocks, in a table
_LEAST = 0.0005  # of a step: smaller parts are not shown
_PARTS = 4  # of steps that are compared, at most


def table_of(rows: Sequence[Row]) -> list[str]:
    """The plans as lines, best first."""
    cells, words = cells_of(rows), {"schedule", "recompute", "offload", "precision", "sharded", *_APART}
    left = [i for i, head in enumerate(cells[0]) if head in words]
    return table_lines(cells, left=left)


def cells_of(rows: Sequence[Row]) -> list[list[str]]:
    """The heads of the table, and a row per plan."""
    cells = [["", "pipeline", "data", "tensor", "context", "expert", "schedule", "micro-batches", "recompute"]]
    cells[0] += ["offload", "precision", "sharded", *_APART, "step", "MFU", "peak"]
    for number, row in enumerate(rows, 1):
        cells.append(
            [
                str(number),
                *(str(row[name]) for name in ("pipeline", "data")),
                f"{row['tensor']}{' +seq' if row['sequence'] else ''}",
                *(str(row[name]) for name in ("context", "expert")),
                schedule_text(row),
                f"{row['microbatches']} x {row['microbatch_size']}",
                recompute_text(row),
                offload_text(row),
                str(row["precision"]),
                strategy_text(row),
                blocks_text(row["blocks"]),
                axes_text(row) or "-",
                row["context_kind"] or "-",
                seconds_text(row["step_seconds"]),
                "" if row["model_flops_utilization"] is None else percent_text(row["model_flops_utilization"]),
                bytes_text(max(row["peak_bytes"])),
            ]
        )
    keep = {i for i, head in enumerate(cells[0]) if not i or not (head in _APART or _says_nothing(head, cells))}
    keep |= {i for i, head in enumerate(cells[0]) if head in _APART and _tells_apart(i, keep, cells)}
    return [[line[i] for i in sorted(keep)] for line in cells]


def _tells_apart(column: int, keep: Set[int], cells: Sequence[Sequence[str]]) -> bool:
    """Whether plans that are the same in columns `keep` differ in another one."""
    heads, *plans = cells
    found: dict[tuple[str, ...], set[str]] = {}
    for line in plans:
        same = tuple(line[i] for i in sorted(keep) if heads[i] not in _RESULTS)
        found.setdefault(same, set()).add(line[column])
    return any(len(values) > 1 for values in found.values())


def _says_nothing(head: str, cells: Sequence[Sequence[str]]) -> bool:
    column = cells[0].index(head)
    if head == "precision":
        return len({line[column] for line in cells[1:]}) == 1
    empty = {"context": "1", "expert": "1", "MFU": "", "offload": "-"}.get(head)
    return all(line[column] == empty for line in cells[1:])


def schedule_text(row: Row) -> str:
    """The schedule as text, such as ``interleaved, 4 chunks``."""
    if row["pipeline"] == row["chunks"] == row["slices"] == 1:
        return "-"
    chunks = f", {row['chunks']} chunks" if row["chunks"] > 1 else ""
    return f"{row['schedule']}{chunks}" + (f", {row['slices']} slices" if row["slices"] > 1 else "")


def blocks_text(blocks: Sequence[int]) -> str:
    """Blocks per stage as text, such as ``5 + 3 x 6 + 4``."""
    runs = [(len(list(same)), number) for number, same in groupby(blocks)]
    parts = [f"{count} x {number}" if count > 1 else str(number) for count, number in runs]
    return " + ".join(parts if len(parts) <= _MOST_RUNS else [*parts[: _MOST_RUNS - 2], "...", parts[-1]])


def axes_text(row: Row) -> str:
    """The mesh axes with degrees above 1, outermost first, such as ``dp,pp``."""
    return ",".join(axis for axis in row["order"].split(",") if row[_DEGREES[axis]] > 1)


def recompute_text(row: Row) -> str:
    """One word, or how many stages have which."""
    given = row["recompute"]
    if isinstance(given, str):
        return given
    return ", ".join(f"{word} on {counted(given.count(word), 'stage')}" for word in dict.fromkeys(given))


def offload_text(row: Row) -> str:
    """What is offloaded as text, such as ``states, all but 4``."""
    kept = row["offload"]
    activations = [] if kept is None else [f"all but {kept}" if kept else "all that can"]
    return ", ".join([*(["states"] if row["offload_states"] else []), *activations]) or "-"


def strategy_text(row: Row) -> str:
    """The data strategy as text, such as ``zero2 per chunk``."""
    if row["data"] * row["context"] == 1:
        return "-"
    per = "" if row["data_granularity"] == "step" else f" per {row['data_granularity']}"
    return f"{row['data_strategy']}{per}"


def degrees_text(row: Row) -> str:
    """The degrees as text, such as ``pipeline 4 x data 2 x tensor 8``."""
    names = ("pipeline", "data", "tensor", "context", "expert")
    return " x ".join(f"{name} {row[name]}" for name in names if row[name] > 1) or "one device"


def parts_of(row: Row) -> list[str]:
    """Where the time of a step goes, the largest part first."""
    step = row["step_seconds"]
    parts = sorted(row["seconds"].items(), key=lambda part: -part[1])
    return [f"{_name(row, name)} {percent_text(seconds / step)}" for name, seconds in parts if seconds > _LEAST * step]


def named_seconds(row: Row) -> dict[str, float]:
    """Seconds of the parts of a step, by their names in words."""
    return {_NAMES[name]: seconds for name, seconds in row["seconds"].items()}


def _name(row: Row, part: str) -> str:
    """A part of a step's time; waits for offload are in that of the pipeline."""
    return "bubble, messages and offload" if part == "pipeline" and row["offload"] is not None else _NAMES[part]


def summary(row: Row) -> list[str]:
    """The reasons that a plan file has."""
    return [f"{degrees_text(row)}: {seconds_text(row['step_seconds'])} per step: {', '.join(parts_of(row))}."]


def lines_of(rows: Sequence[Row], memory_bytes: float, devices: int) -> list[str]:
    """The table, and the time and the memory of the best plan, of which a device has `memory_bytes`."""
    best = rows[0]
    of = "" if memory_bytes == inf else f" of {bytes_text(memory_bytes)}"
    unit = "samples" if best["tokens_per_second"] is None else "tokens"
    length = round(best["tokens_per_second"] / best["samples_per_second"]) if unit == "tokens" else None
    sequences = "" if length is None else f", sequences of {length:,} {plural('token', length)}"
    lines = [
        *table_of(rows),
        "",
        f"plan 1: {number_text(best[f'{unit}_per_second'])} {unit}/s in {best['precision']}{sequences}; "
        f"{bytes_text(max(best['peak_bytes']))}{of} per device",
        f"time: {', '.join(parts_of(best))}",
    ]
    if best["devices"] < devices:
        lines.append(f"devices: {best['devices']:,} of {devices:,} are used")
    if "," in (axes := axes_text(best)):
        lines.append(f"mesh axes on devices, outermost first: {axes}")
    return lines


def counts_of(answer: Answer) -> list[str]:
    """How many configurations were considered, and why others were not."""
    return [
        *early_end(answer),
        f"{answer.considered:,} configurations considered, {answer.simulated:,} simulated, in "
        f"{seconds_text(answer.seconds)}. Refused or discarded:",
        *(f"  {count:>9,}  {reason}" for reason, count in answer.refused.items()),
    ]


def early_end(answer: Answer) -> list[str]:
    """A line where the search ended before it had looked at all that may be better than the best plan."""
    if not 0 < answer.least < answer.value:
        return []
    least, does = {
        "time": (seconds_text(answer.least), "takes"),
        "cost": (f"{seconds_text(answer.least)} x devices", "takes"),
        "memory": (f"{bytes_text(answer.least)} per device", "needs"),
    }[answer.objective]
    more = percent_text(answer.value / answer.least - 1)
    return [f"The search ended early: no plan {does} less than {least}; plan 1 {does} {more} more."]


def against(best: Row, other: Row, number: int) -> str:
    """Why plan `number` is behind the best one."""
    return f"plan {number}: {_behind(best, other)}"


def usual_text(best: Row, usual: Row, name: str) -> str:
    """Why the usual choice, which is called `name`, lost."""
    if all(usual[key] == best[key] for key in (*_DEGREES.values(), "schedule", "step_seconds")):
        return f"{name}: plan 1"
    schedule = "" if usual["pipeline"] == 1 else f"{schedule_text(usual)}, "
    return (
        f"{name} ({degrees_text(usual)}, {schedule}micro-batches {usual['microbatches']} x {usual['microbatch_size']}, "
        f"recompute {recompute_text(usual)}): {seconds_text(usual['step_seconds'])}, {_behind(best, usual)}"
    )


def _behind(best: Row, other: Row) -> str:
    """Why a plan is behind; of one with another number of devices, also how much more of their time it takes."""
    count, text = other["devices"], _longer(best, other)
    if count == best["devices"]:
        return text
    cost = count * other["step_seconds"] / (best["devices"] * best["step_seconds"])
    more = f"{percent_text(abs(cost - 1))} {'more' if cost >= 1 else 'less'}"
    difference = more if cost < 2 else f"{cost:.2g} times the"
    return f"{text}; on {counted(count, 'device')}, {difference} device time"


def _longer(best: Row, other: Row) -> str:
    """How much longer the step is, and the parts that are longer or shorter; or how much more memory."""
    times = other["step_seconds"] / best["step_seconds"]
    more = {name: other["seconds"][name] - best["seconds"][name] for name in best["seconds"]}
    largest = sorted(more.items(), key=lambda part: -abs(part[1]))[:_PARTS]
    shown = sorted(
        (part for part in largest if abs(part[1]) > _LEAST * best["step_seconds"]), key=lambda part: -part[1]
    )
    parts = ", ".join(f"{_name(other, name)} {'-+'[more > 0]}{seconds_text(abs(more))}" for name, more in shown)
    if times > 1 + _LEAST:
        pace = f"{percent_text(times - 1)} slower" if times < 2 else f"{times:.2g} times as long as plan 1"
        return f"{pace}: {parts}" if parts else pace
    pace = "as fast" if times > 1 - _LEAST else f"{percent_text(1 - times)} faster"
    memory = max(other["peak_bytes"]) - max(best["peak_bytes"])
    return f"{pace}, {bytes_text(memory)} more per device" if memory > 0 else pace
