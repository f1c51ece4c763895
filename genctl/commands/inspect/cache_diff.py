"""Two prompts compared: their common prefix, and what reusing its cache saves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.text import Text

from genctl.commands.inspect.cache_report import PIPE
from genctl.errors import count, percent, size
from genctl.terminal import theme, widgets
from genctl.terminal.text_width import first_cells, hanging, last_cells

LABEL = 16  # cells


def diff_lines(diff: Mapping[str, Any], width: int | None) -> list[Text]:
    """The comparison in lines of at most `width` cells."""
    page = width or PIPE
    room = page - LABEL
    common, tokens = diff["common_tokens"], diff["prompt_tokens"]
    lines = [widgets.header(page, "reused by", diff["prompt"])]
    shown = last_cells(diff["common_text"], room - 2) if common else ""
    lines += _line("in common", count(common, "token") + (f": “{shown}”" if common else ""), page)
    for name, text in zip(("the first", "the other"), diff["part"], strict=True):
        lines += _line(name, f"goes on “{first_cells(text, room - 10)}”" if text else "ends here", page)
    reused, bytes_ = diff["reused_tokens"], diff["spared_bytes"]
    words = f"{reused} of {count(tokens, 'token')} ({percent(diff['share_reused'], 0)})"
    if reused:
        words += f", {bytes_:,} bytes of cache" + (f" ({size(bytes_)})" if bytes_ >= 1024 else "")
    lines += _line("reused", words, page)
    if diff["reason"]:
        lines += _line("", diff["reason"], page)
    for name, key in (("with reuse", "with_reuse"), ("without", "without_reuse")):
        counts = diff[key]
        read, passes = count(counts["prompt_tokens_read"], "token"), counts["passes"]
        lines += _line(name, f"{read} of the prompt read, {count(passes, 'pass', 'passes')} in all", page)
    same = "the same tokens were written" if diff["tokens_agree"] else "DIFFERENT tokens were written"
    lines += _line("", same, page, error=not diff["tokens_agree"])
    return lines


def _line(label: str, words: str, width: int, *, error: bool = False) -> list[Text]:
    return hanging(f"{label:<{LABEL}}", widgets.visible(words), width, theme.ERROR if error else theme.PLAIN)
