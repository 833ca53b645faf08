"""`PretrainedTokenizer`: the tokenizer of a Hugging Face directory, with its chat template."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipeloom.data.tokenizers import Tokenizer
from pipeloom.errors import DataError, one_line

_FILES = (
    "tokenizer*",
    "*.model",
    "vocab*",
    "merges*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
)
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ANSWERS = "assistant"
Messages = Sequence[Mapping[str, Any]]


class PretrainedTokenizer(Tokenizer):
    """The tokenizer that transformers' AutoTokenizer loads from a directory. Nothing is downloaded.

    Attributes:
        own: the tokenizer of transformers.
        end: the tokens at the end of a document: the end-of-text token, if there is one.
        padding: the token that fills up samples.

    Raises:
        DataError: transformers is not installed, or the directory has no tokenizer.
    """

    def __init__(self, directory: Path) -> None:
        try:
            import transformers
        except ImportError:
            raise DataError(
                f"tokenizer {directory}: transformers is not installed. Run pip install 'pipeloom[huggingface]'."
            ) from None
        self._directory, self.source = directory, str(directory.absolute())
        try:
            self.own: Any = transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
        except Exception as error:  # of any type, from files that are missing or damaged
            raise DataError(
                f"{directory} has no tokenizer that transformers can load ({one_line(error)}). Copy its tokenizer "
                "files, or name a tokenizer.json with --data.tokenizer."
            ) from None
        files = sorted({file for pattern in _FILES for file in directory.glob(pattern) if file.is_file()})
        self.fingerprint = b"\0".join([transformers.__version__.encode(), *(file.read_bytes() for file in files)])
        self.vocabulary_size = 1 + max(self.own.get_vocab().values(), default=0)
        self.dtype = np.min_scalar_type(self.vocabulary_size - 1)
        ends = (self.own.eos_token_id, self.own.sep_token_id)
        self.end = [token for token in ends if token is not None][:1]
        self.start = self._start()
        pad = self.own.pad_token_id
        self.padding: int = pad if pad is not None else self.end[0] if self.end else 0

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.own.decode(list(tokens), skip_special_tokens=False))

    def prompt(self, text: str) -> list[int]:
        return [*self.start, *self.plain([text])[0]] or self.end or [self.padding]

    def _start(self) -> list[int]:
        """The tokens that the tokenizer puts in front of a text, such as that of its beginning."""
        [plain], whole = self.plain(["a"]), list(self.own("a")["input_ids"])
        places = range(len(whole) - len(plain) + 1)
        return whole[: next((k for k in places if whole[k : k + len(plain)] == plain), 0)]

    def plain(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without special tokens around it."""
        if not self.own.is_fast:
            return list(self.own(list(texts), add_special_tokens=False, verbose=False)["input_ids"])
        fast = self.own.backend_tokenizer
        fast.no_truncation()
        fast.no_padding()
        return [each.ids for each in fast.encode_batch_fast(list(texts), add_special_tokens=False)]

    # Conversations

    def conversation(self, messages: Messages, tools: Any = None) -> tuple[list[int], list[bool]]:
        """The ids of a conversation in the chat template, and which of them belong to turns of the assistant.

        These are what the template marks with ``{% generation %}``; else what each turn of the assistant adds to the
        conversation before it.

        Raises:
            DataError: no template, a conversation that the template refuses, or does not render, or turns that change
                those before them.
        """
        template = self._template(tools)
        if any(each.get("content") is None for each in messages) and "tool_calls" not in template:
            raise DataError(
                "messages: a content is null beside tool_calls, which the chat template does not render. Use a "
                "template with tools, or give a string."
            )
        settings: dict[str, Any] = {"tools": tools, "return_dict": True}
        try:
            if _MARKS.search(template):
                marked = self.own.apply_chat_template(messages, return_assistant_tokens_mask=True, **settings)
                return list(marked["input_ids"]), [bool(scored) for scored in marked["assistant_masks"]]
            return self._by_prefixes(messages, tools)
        except DataError:
            raise
        except Exception as error:  # the template's own refusals, and those of jinja
            raise DataError(f"the chat template refuses the messages ({one_line(error)}). Change them.") from None

    def _template(self, tools: Any) -> str:
        try:
            return str(self.own.get_chat_template(tools=tools))
        except ValueError:
            raise DataError(
                f"messages: the tokenizer of {self._directory} has no chat template. Add chat_template.jinja to the "
                "directory, or use prompt and completion."
            ) from None

    def _by_prefixes(self, messages: Messages, tools: Any) -> tuple[list[int], list[bool]]:
        def rendered(count: int, *, asks: bool = False) -> str:
            return str(
                self.own.apply_chat_template(
                    list(messages[:count]), tools=tools, tokenize=False, add_generation_prompt=asks
                )
            )

        whole = rendered(len(messages))
        spans = []
        for index, message in enumerate(messages):
            if message["role"] == _ANSWERS:
                before, after = rendered(index, asks=True) if index else "", rendered(index + 1)
                if not after.startswith(before) or not whole.startswith(after):
                    raise DataError(
                        f"messages: the chat template renders turn {index + 1} of the assistant differently at the end "
                        "of a conversation and inside it. Mark the assistant's turns in the template with "
                        "{% generation %} and {% endgeneration %}, or use prompt and completion."
                    )
                spans.append((len(before), len(after)))
        found = self.own(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids, offsets = list(found["input_ids"]), found["offset_mapping"]
        return ids, [any(first <= start < last for first, last in spans) for start, _ in offsets]
