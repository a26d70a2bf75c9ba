"""Pages of one file: style, script and numbers are inside, nothing is asked of a network."""

from __future__ import annotations

import html
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

# The browser itself refuses whatever would leave the page, should a text of a run ever become markup.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def page_of(title: str, data: dict[str, Any], *, scripts: tuple[str, ...], footer: str = "") -> str:
    """A page that shows `data`: the scripts, files of observe/page, find it as JSON and draw it.

    >>> page = page_of("a < b", {"name": "</script>"}, scripts=("draw.js",))
    >>> "<title>a &lt; b</title>" in page, '{"name": "\\\\u003c/script>"}' in page
    (True, True)
    """
    script = "\n".join(_part(name) for name in scripts)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<link rel="icon" href="data:,">
<title>{html.escape(title)}</title>
<style>
{_part("style.css")}</style>
</head>
<body>
<main id="page"><noscript><p class="note">This page draws itself with a script inside it: allow scripts to see it.</p>
</noscript></main>
<footer>{html.escape(footer)}</footer>
<script type="application/json" id="data">{as_script(data)}</script>
<script>
{script}</script>
</body>
</html>
"""


def as_script(data: Any) -> str:
    """JSON that can stand inside a script element: no text in it ends the element or begins a comment.

    >>> as_script(["<!--", 1])
    '["\\\\u003c!--", 1]'
    """
    return json.dumps(data, allow_nan=False).replace("<", "\\u003c")


def write_whole(path: Path, text: str) -> None:
    """All of it or nothing: somebody may have the old page open. What is no file, such as a pipe, is written to:
    another in its place would be none."""
    path = path.resolve()  # else a file would take the place of a link, and not of what it leads to
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    try:
        new.write_text(text, encoding="utf-8")
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def _part(name: str) -> str:
    return (files("zerofold.observe") / "page" / name).read_text(encoding="utf-8")
