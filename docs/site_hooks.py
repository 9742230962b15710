"""Adapts pages and docstrings to the site; in the repository they read well as they are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.structure.files import Files

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
ROLE = ":(?:class|meth|func|mod|attr|data):"


def on_files(files: Files, *, config: Any) -> Files:
    """Adds the examples, which lie outside docs/ and which pages link to."""
    for path in EXAMPLES.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        files.append(File.generated(config, f"examples/{path.name}", content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Points links to the examples at those copies."""
    return re.sub(r"\]\(((?:\.\./)*)\.\./examples/(\w+\.py)\)", r"](\1examples/\2)", markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Drops Sphinx's markup of docstrings: roles, paths of names with ``~``, lone colons."""
    html = re.sub(rf"{ROLE}<code>~[\w.]*?(\w+)</code>", r"<code>\1</code>", html)
    return re.sub(rf"{ROLE}(<code>)", r"\1", html).replace("<p>::</p>", "")
