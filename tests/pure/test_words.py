"""Sentences that users read contain no phrase of this list: docstrings, messages, reports, README, docs and help."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from pipeloom import cli

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "pipeloom"

_COUNTED = "bytes|seconds|ms|stages|ranks|micro-batches|tokens|files|rows|layers|steps|versions|chunks|messages|copies"
_UNIT = (
    "parameter|rank|step|stage|family|update|micro-batch|token|command|process|device|second|node|layer|sample|copy"
    "|replica|element|line"
)

# A pattern, and the better words.
REPLACEMENTS = {
    rf"\b(?:{_COUNTED}) an? (?:{_UNIT})\b(?!-)": "per: bytes per parameter",
    r"\bone (?:module|value|word|row|file|entry) an? (?:stage|rank|step|process|layer|family|line)\b": "per",
    r"\bcopies of (?:the|a) pipeline\b|\bother copies\b|\ball copies\b|\bof copy \d": "data-parallel replicas",
    r"\bwhat .{0,30}\bcomes? to\b": "the result, the total, the numbers of",
    r"\b(?:is|are|was|were) told\b": "receives, is passed, is reported",
    r"\bby turns\b": "alternately",
    r"\bof which the\b": "whose, with a",
    r"\bcounts? for nothing\b|\bfor nothing then\b": "is ignored",
    r"\bloud hours?\b": "background load",
    r"\bnobody\b|\bsomebody\b|\beverybody\b": "no rank, another process, all ranks",
    r"\bstart-up and (?:its |their )?drain\b": "warm-up and cool-down",
    r"\bmost at once\b": "peak",
    r"\bunder ?way\b": "in flight, overlap",
    r"\ba whole parameter\b|\bwhole parameters\b|\bthe whole parameter\b": "full parameter",
    r"\bwhere (?:to|from) (?:it|they) go": "offload target",
    r"\bstages? a rank\b": "virtual stages per rank",
    r"\bis of another (?:model|type|kind|layout)\b": "was saved from a different model, has another type",
    r"\bis no (?:number|text|JSON|UTF|action|list|module|directory|file|tensor|mesh|schedule|object)\b": "is not",
    r"\bstands? twice\b": "is duplicated",
    r"\bis a whole number\b|\bwhole numbers?\b": "integer",
    r"; correct (?:it|them)\b": "the rule and a fix that can be carried out",
    r"; (?:raise|lower|drop|name|give|take|pass|choose|use) (?:it|them|one|another)\b": "a sentence of its own",
    r"\bput right\b": "repair, clean up",
    r"\bin spite of\b": "despite, although",
    r"\blets? go of\b": "release",
    r"\bwhatever .{0,30} by then\b": "current",
    r"\blies? beside\b|\bstands? beside\b": "is in the same directory, in addition to",
    r"\bfetch(?:es|ed)? home\b|\bcomes? home\b": "reload, all-gather",
    r"\bas (?:it|they) (?:is|are) by then\b": "current",
}
PATTERNS = [(re.compile(pattern, re.IGNORECASE), better) for pattern, better in REPLACEMENTS.items()]

# Folders whose sentences are still to be rewritten. A folder without a finding must leave the list.
PENDING: set[str] = {
    "docs",
}


# Commands whose help is still to be rewritten, likewise.
PENDING_HELP: set[str] = set()


def _sentences(path: Path) -> Iterator[tuple[str, str]]:
    """(place, text) of all strings in a Python file, or the paragraphs of another file."""
    name = path.relative_to(ROOT).as_posix()
    if path.suffix != ".py":
        for paragraph in re.split(r"\n\s*\n", path.read_text()):
            yield name, " ".join(paragraph.split())
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            parts = [str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values]
            yield f"{name}:{node.lineno}", " ".join("".join(parts).split())
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield f"{name}:{node.lineno}", " ".join(node.value.split())


def _folder(path: Path) -> str:
    return path.parent.relative_to(ROOT).as_posix()


def _files() -> list[Path]:
    sources = [*SOURCE.rglob("*.py"), *SOURCE.rglob("*.j2")]
    return sorted([*sources, *(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])


def _findings(text: str) -> list[str]:
    return [f"{found[0]!r}: write {better}" for pattern, better in PATTERNS if (found := pattern.search(text))]


def _found() -> dict[str, list[str]]:
    """Findings by folder. No pattern fits over the end of a sentence, so files are searched as a whole first."""
    found: dict[str, list[str]] = {}
    for path in _files():
        sentences = dict.fromkeys(_sentences(path)) if path.exists() else {}
        if _findings("\n".join(text for _, text in sentences)):
            for place, text in sentences:
                found.setdefault(_folder(path), []).extend(f"{place}: {finding}" for finding in _findings(text))
    return {folder: places for folder, places in found.items() if places}


def test_sentences_use_the_words_of_the_field() -> None:
    found = _found()
    wrong = [place for folder, places in found.items() if folder not in PENDING for place in places]
    assert not wrong, "\n".join(wrong)
    assert found.keys() >= PENDING, f"no findings left, remove from PENDING: {sorted(PENDING - found.keys())}"


@pytest.mark.parametrize(
    "command",
    ["", "train", "simulate", "schedules", "partition", "slice", "memory", "checkpoint", "report", "doctor"],
)
def test_help_uses_the_words_of_the_field(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with suppress(SystemExit):
        cli.main([*command.split(), "--help"])
    wrong = _findings(" ".join(capsys.readouterr().out.split()))
    assert bool(wrong) == (command in PENDING_HELP), wrong


@pytest.mark.parametrize(
    ("bad", "good"),
    [
        ("Bytes a parameter that a process holds", "Bytes per parameter held per process"),
        ("the copies of the pipeline", "the data-parallel replicas"),
        ("what a schedule comes to", "the makespan of a schedule"),
        ("the rank is told its peers", "the rank receives its peers"),
        ("in loud hours ratios move", "under background load the ratios approach 1"),
        ("x is 3: it is a whole number; correct it", "x=3: must be an integer."),
    ],
)
def test_the_list_finds_what_it_is_for(bad: str, good: str) -> None:
    assert _findings(bad)
    assert not _findings(good)
