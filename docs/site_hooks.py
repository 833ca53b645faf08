"""MkDocs hook: links to files outside ``docs/`` become plain text on the site, which holds the pages alone."""

from __future__ import annotations

import posixpath
import re
from typing import Any


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace ``[text](../../examples/x.py)`` by its text and the path from the root of the repository."""
    folder = posixpath.dirname(f"docs/{page.file.src_uri}")

    def plain(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, match[2].partition("#")[0]))
        if re.match(r"[a-z]+:|#", match[2]) or path.startswith("docs/"):
            return match[0]
        return match[1] if path in match[1] else f"{match[1]} (`{path}`)"

    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)", plain, markdown)
