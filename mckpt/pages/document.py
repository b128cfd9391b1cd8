"""A page as one HTML file that needs nothing else and sends nothing: its style and its script are
inside, and its policy lets no other script run.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import secrets
from pathlib import Path
from typing import Any

from mckpt.errors import UsageError
from mckpt.pages.markup import Markup, tag

HERE = Path(__file__).parent
DATA = "data"  # the id of the element with the data of the script


def page(title: str, style: Path, *children: Any, script: Path | None = None) -> str:
    """Returns the whole page. style, script: files whose content becomes part of it."""
    css = "".join(path.read_text(encoding="utf-8") for path in (HERE / "base.css", style))
    code = script.read_text(encoding="utf-8") if script else ""
    runs = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    policy = "default-src 'none'; style-src 'unsafe-inline'" + (
        f"; script-src 'sha256-{runs}'" if code else ""
    )
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<style>
{css}</style>
{tag("title", title)}</head><body>
{tag("main", *children)}{f"<script>{code}</script>" if code else ""}</body></html>
"""


def data(value: Any) -> Markup:
    """Returns an element with the data of the script, of which no character is markup."""
    text = json.dumps(value, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(f'<script type="application/json" id="{DATA}">{text}</script>')


def write(text: str, path: str | Path) -> None:
    """Writes the page, whole or not at all; raises OSError if that fails. A symbolic link stays,
    and the file that it names is written.
    """
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".mckpt-{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as file:
            file.write(text.encode())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def refuse(path: str | Path) -> None:
    """Raises UsageError if a page cannot be written to `path`."""
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise UsageError(f"{path}: cannot be written: something that is not a file has this name")
    folder = target.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(
            f"{path}: cannot be written: {folder} must be a directory that may be written to"
        )
