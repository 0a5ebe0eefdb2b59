"""The page, as sources that are joined to one file."""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files

SCRIPTS = (
    "dom.js",
    "format.js",
    "store.js",
    "charts.js",
    "list.js",
    "groups.js",
    "tokens.js",
    "conversation.js",
    "overview.js",
    "app.js",
)
"""In the order in which they are joined: a later one uses what an earlier one declares."""


def page_html() -> str:
    """`index.html`: one file that needs no other but its data.

    A content policy lets no script run but the page's own, known by its hash, and scripts from files.
    """
    sources = files(__name__)
    script = "\n".join(sources.joinpath(name).read_text("utf-8") for name in SCRIPTS)
    script = f'\n"use strict";\n(() => {{\n{script}}})();\n'
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = sources.joinpath("page.html").read_text("utf-8")
    for mark, text in (
        ("/*style*/", sources.joinpath("style.css").read_text("utf-8")),
        ("/*script*/", script),
        ("/*hash*/", f"'sha256-{digest}'"),
    ):
        before, after = page.split(mark)
        page = f"{before}{text}{after}"
    return page
