"""The page of a comparison of sides: charts, texts and tables, without a script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from genctl.pages.page import digest, file_text, filled


def parity_page(
    title: str, command: str, facts: Sequence[tuple[str, str]], pairs: Sequence[Mapping[str, Any]]
) -> bytes:
    """The page in UTF-8. `pairs` have the fields that the template names; every text in them is escaped there."""
    style = file_text("page.css") + file_text("parity.css")
    text = filled(
        "parity.html.jinja",
        title=title,
        command=command,
        facts=facts,
        pairs=pairs,
        style=style,
        style_digest=digest(style),
    )
    return text.encode("utf-8", "backslashreplace")
