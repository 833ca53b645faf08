"""The results of a fault campaign as rows, Markdown and JSON. No torch."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pipeloom.chaos.campaign import Result
from pipeloom.chaos.comparison import EQUAL, NOT_COMPARED
from pipeloom.chaos.fault import KINDS

HEADINGS = ("#", "fault", "rank", "where", "noticed by", "after", "ended", "step again", "recovered", "bitwise", "left")
_MOST_LETTERS = 60
_CLOSE = 0.2  # to the factor of a slow rank


def row(result: Result) -> tuple[str, ...]:
    """The cells of one fault."""
    return (
        str(result.number),
        result.fault.kind,
        str(result.fault.rank),
        _shortened(result.where or "not reached"),
        result.noticed_by or "-",
        _seconds(result.noticed_seconds),
        _seconds(result.ended_seconds),
        _seconds(result.again_seconds),
        result.recovered,
        _bitwise(result),
        ", ".join(result.left) or "nothing",
    )


def summary(results: Sequence[Result]) -> list[str]:
    """Lines with totals per kind."""
    lines = []
    for kind in KINDS:
        of_kind = [result for result in results if result.fault.kind == kind]
        if not of_kind:
            continue
        text = f"{kind}: {sum(result.good for result in of_kind)} of {len(of_kind)} bitwise, nothing left"
        for name, key in (("noticed", "noticed_seconds"), ("step again", "again_seconds")):
            times = [seconds for result in of_kind if (seconds := getattr(result, key)) is not None]
            text += f"; {name} within {max(times):.1f} s ({len(times)})" if times else ""
        text += _factors(of_kind) if kind == "slow" else ""
        missed = Counter(result.where is None for result in of_kind)[True]
        lines.append(text + (f"; {missed} not reached" if missed else ""))
    return lines


def markdown(title: str, facts: Sequence[str], results: Sequence[Result]) -> str:
    """The whole campaign as a page."""
    head = ["| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
    body = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row(result)) + " |" for result in results]
    notices = [f"{result.number}. `{result.notice}`" for result in results if result.notice]
    parts = [
        f"# {title}",
        "\n".join(f"* {fact}" for fact in facts),
        "\n".join(f"* {each}" for each in summary(results)),
    ]
    return (
        "\n\n".join([*parts, "\n".join([*head, *body]), "## First lines about each fault", "\n".join(notices)]) + "\n"
    )


def to_json(result: Result) -> dict[str, Any]:
    """A result as a JSON object, with whether it is good."""
    outcome = None if result.outcome is None else result.outcome._asdict()
    return {**asdict(result), "outcome": outcome, "good": result.good}


def _factors(results: Sequence[Result]) -> str:
    """How many of the factors that runs named are near those that were injected, and those that were measured."""
    text = ""
    for words, key in (("injected", "times"), ("measured", "measured_factor")):
        known = [getattr(each.fault if key == "times" else each, key) for each in results]
        near = [
            abs(each.named_factor / factor - 1) <= _CLOSE
            for each, factor in zip(results, known, strict=True)
            if each.named_factor and factor
        ]
        text += f"; {sum(near)} of {len(near)} factors within {_CLOSE:.0%} of the {words} one" if near else ""
    return text


def _bitwise(result: Result) -> str:
    if result.outcome is None:
        return "not completed"
    different = [
        f"{name}: {text}" for name, text in result.outcome._asdict().items() if text not in (EQUAL, NOT_COMPARED)
    ]
    same = "within 0.1 %" if NOT_COMPARED in result.outcome else "yes"
    return "; ".join(different) or same


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f} s"


def _shortened(text: str) -> str:
    return text if len(text) <= _MOST_LETTERS else text[: _MOST_LETTERS - 3] + "..."
