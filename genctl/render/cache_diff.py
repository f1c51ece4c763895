"""Two prompts compared: their common prefix, and what reusing its cache saves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.text import Text

from genctl.render import theme, widgets
from genctl.render.cache_report import PIPE, count, size
from genctl.render.text_width import first_cells, last_cells, wrap

LABEL = 16  # cells


def diff_lines(diff: Mapping[str, Any], width: int | None) -> list[Text]:
    """The comparison in lines of at most `width` cells."""
    page = width or PIPE
    room = page - LABEL
    common, tokens = diff["common_tokens"], diff["prompt_tokens"]
    lines = [widgets.header(page, "reused by", diff["prompt"])]
    shown = last_cells(diff["common_text"], room - 2) if common else ""
    lines.append(_line("in common", count(common, "token") + (f": “{shown}”" if common else "")))
    for name, text in zip(("the first", "the other"), diff["part"], strict=True):
        lines.append(_line(name, f"goes on “{first_cells(text, room - 10)}”" if text else "ends here"))
    reused, bytes_ = diff["reused_tokens"], diff["spared_bytes"]
    words = f"{reused} of {count(tokens, 'token')} ({diff['share_reused'] * 100:.0f}%)"
    if reused:
        words += f", {bytes_:,} bytes of cache" + (f" ({size(bytes_)})" if bytes_ >= 1024 else "")
    lines.append(_line("reused", words))
    if diff["reason"]:
        lines += [_line("", part.rstrip()) for part in wrap(diff["reason"], room)]
    for name, key in (("with reuse", "with_reuse"), ("without", "without_reuse")):
        counts = diff[key]
        read, passes = count(counts["prompt_tokens_read"], "token"), counts["passes"]
        lines.append(_line(name, f"{read} of the prompt read, {passes} pass{'' if passes == 1 else 'es'} in all"))
    same = "the same tokens were written" if diff["tokens_agree"] else "DIFFERENT tokens were written"
    lines.append(_line("", same, error=not diff["tokens_agree"]))
    return [widgets.fit(line, width) for line in lines]


def _line(label: str, words: str, *, error: bool = False) -> Text:
    line = Text().append(f"{label:<{LABEL}}", style=theme.DIM)
    line.append(widgets.visible(words), style=theme.ERROR if error else theme.PLAIN)
    return line
