"""Documents of JSON lines or rows, as ids and which of them are scored.

{"text": "..."}                                   all of it is scored
{"prompt": "...", "completion": "..."}            the completion is scored
{"messages": [{"role": ..., "content": ...}]}     the turns of the assistant are scored
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pipeloom.common.json_reader import parse_json
from pipeloom.data.opened import unreadable
from pipeloom.data.pretrained_tokenizer import PretrainedTokenizer
from pipeloom.data.shards import JSON_LINES, Line, json_word, text_of
from pipeloom.errors import DataError, shortened

_KINDS = {"text": ("text",), "prompt and completion": ("prompt", "completion"), "messages": ("messages",)}
_TOGETHER = 1024  # lines that are tokenized at once


class Document(NamedTuple):
    """The tokens of a document, and which of them count in the loss."""

    ids: list[int]
    scored: list[bool]


def check_no_array(file: Path) -> None:
    """Raises DataError if a file is a JSON array of records, which would be read as text with all its brackets."""
    try:
        content = file.read_bytes()
        records = parse_json(content) if content[:100].strip().startswith(b"[") else None
    except OSError as error:
        raise unreadable(file, error) from None
    except ValueError:
        return
    keys = {key for each in _KINDS.values() for key in each}
    if isinstance(records, list) and records and isinstance(records[0], dict) and keys & records[0].keys():
        raise DataError(f"{file} is a JSON array of records. Write them as a {JSON_LINES} file, one object per line.")


def documents(lines: Iterator[Line], tokenizer: PretrainedTokenizer) -> Iterator[tuple[Line, Document]]:
    """The document of each line.

    Raises:
        DataError: a line without text, or with a conversation that the chat template refuses.
    """
    waiting: list[Line] = []
    for line in lines:
        waiting.append(line)
        if len(waiting) == _TOGETHER:
            yield from zip(waiting, _tokenized(waiting, tokenizer), strict=True)
            waiting = []
    yield from zip(waiting, _tokenized(waiting, tokenizer), strict=True)


def _tokenized(lines: Sequence[Line], tokenizer: PretrainedTokenizer) -> Iterator[Document]:
    kinds = [_kind(line) for line in lines]
    texts = [
        text_of(line, key)
        for line, kind in zip(lines, kinds, strict=True)
        if kind != "messages"
        for key in _KINDS[kind]
    ]
    found = iter(tokenizer.plain(texts) if texts else ())
    start, end = tokenizer.start, tokenizer.end
    for line, kind in zip(lines, kinds, strict=True):
        if kind == "messages":
            yield _conversation(line, tokenizer)
            continue
        before = start if kind == "text" else [*start, *next(found)]
        rest = [*next(found), *end]
        scored = kind == "text" or not before
        yield Document([*before, *rest], [scored] * len(before) + [True] * len(rest))


def _kind(line: Line) -> str:
    found = [kind for kind, keys in _KINDS.items() if any(key in line.record for key in keys)]
    if len(found) != 1 or not all(key in line.record for key in _KINDS[found[0]]):
        keys = shortened(", ".join(map(str, line.record)), 200) or "no keys"
        raise DataError(f"{line.place} has {keys}: must have {_kinds()}. Change it.")
    return found[0]


def _kinds() -> str:
    return "either text, or prompt and completion, or messages"


def _conversation(line: Line, tokenizer: PretrainedTokenizer) -> Document:
    messages = line.record["messages"]
    is_list = isinstance(messages, list) and messages
    if not is_list or not all(isinstance(each, dict) and isinstance(each.get("role"), str) for each in messages):
        raise DataError(f"{line.place}: messages must be a list of objects with role and content. Change it.")
    for number, each in enumerate(messages, start=1):
        content = each.get("content")
        if not isinstance(content, str | list | dict) and not (content is None and each.get("tool_calls")):
            raise DataError(
                f"{line.place}: content of message {number} ({shortened(each['role'], 60)}) is {json_word(content)}, "
                "and must be a string. Change it."
            )
    if not any(each["role"] == "assistant" for each in messages):
        raise DataError(f"{line.place}: messages have no turn of the role assistant, which is scored. Add one.")
    try:
        return Document(*tokenizer.conversation(messages, line.record.get("tools")))
    except DataError as error:
        raise DataError(f"{line.place}: {error}") from None
