"""A page from the data of a run: the template filled, everything inside the one file.

A page loads nothing and sends nothing: its policy allows the one style sheet and the one script, by their digests. Text
of a model, a prompt or a preset reaches it in two ways only: through the template, which escapes it, and as JSON in
which no character can end a script element.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any

from genctl.pages.page_data import LONG, PageData
from genctl.pages.tree_columns import SCALE, TreeDetail
from genctl.terminal.widgets import visible

LARGEST = 2_000_000  # bytes of a page, unless its texts alone are longer
WITHOUT_SCRIPT = 500  # prompts that are shown where scripts are off

# From the whole run to what always fits: how much of the trees, whether prompts and texts are cut, and what the page
# says of it.
_STAGES: tuple[tuple[TreeDetail, bool, str], ...] = (
    (TreeDetail(), False, ""),
    (TreeDetail("returned"), False, "alternatives are kept for returned sequences only"),
    (TreeDetail("none"), False, "alternatives are left out"),
    (
        TreeDetail("none", "returned"),
        False,
        "alternatives are left out; ranks and entropies are those of returned sequences",
    ),
    (TreeDetail("none", "none"), False, "alternatives, ranks and entropies are left out"),
    (TreeDetail("none", "none", dead=False), False, "alternatives, ranks, entropies and dead branches are left out"),
    (
        TreeDetail("none", "none", dead=False),
        True,
        f"texts are cut after {LONG} characters; alternatives, ranks, entropies and dead branches are left out",
    ),
)


def page(data: PageData) -> bytes:
    """The page in UTF-8. Details are left out until it has at most LARGEST bytes, alternatives first; it says which."""
    style, script = (file_text(name) for name in ("page.css", "page.js"))
    text = ""
    for document, left_out in _documents(data):
        text = _filled(data, document, style, script, left_out)
        if len(text.encode("utf-8", "backslashreplace")) <= LARGEST:
            break
    return text.encode("utf-8", "backslashreplace")


def _documents(data: PageData) -> Iterator[tuple[dict[str, Any], str]]:
    """The data with less and less detail, and what is left out."""
    for detail, short, left_out in _STAGES:
        yield data.document(detail, short=short), left_out
    detail, short, left_out = _STAGES[-1]
    kept = len(data.lanes)
    while kept:
        kept //= 2
        yield data.document(detail, with_tokens=kept, short=short), f"tokens are those of {kept:,} prompts; {left_out}"


def script_json(value: Any) -> str:
    """JSON that can stand in a script element: no `<`, `>` or `&`, and no line separator of JavaScript."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def digest(text: str) -> str:
    """The source expression of a policy for an element with this text."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _filled(data: PageData, document: Mapping[str, Any], style: str, script: str, left_out: str) -> str:
    unlisted = f"{data.unlisted:,} more prompts are not listed" if data.unlisted else ""
    return filled(
        "page.html.jinja",
        title=data.title,
        command=visible(data.command),
        facts=[(label, visible(value)) for label, value in data.facts],
        job=data.job,
        left_out="; ".join(filter(None, (left_out, unlisted))),
        document=document,
        lanes=document["lanes"][:WITHOUT_SCRIPT],
        more=max(len(document["lanes"]) - WITHOUT_SCRIPT, 0),
        scale=SCALE,
        style=style,
        style_digest=digest(style),
        script=script,
        script_digest=digest(script),
        data=script_json({**document, "scale": SCALE}),
    )


def filled(template: str, **values: Any) -> str:
    """A template of this package with its values, which it escapes."""
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    return environment.from_string(file_text(template)).render(**values)


def file_text(name: str) -> str:
    """A file of this package."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
