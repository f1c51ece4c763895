"""Texts that repeat themselves as real ones do, to measure drafts.

Random weights write circles, where every draft of prompt lookup is right. A checkpoint with `by_heart`
(`checkpoints.Size`) writes one of these texts instead, so drafts are right where the text repeats itself.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
_WORD = re.compile(r" ?\w+| ?[^\s\w]+|\s+")  # as GPT-2 cuts a text before it pairs bytes


def code() -> str:
    """Python: a module of genctl."""
    return (ROOT / "genctl" / "results.py").read_text(encoding="utf-8")


def structured() -> str:
    """JSON: the schema of presets."""
    from genctl.config.presets import schema

    return json.dumps(schema()["properties"], indent=1)


def summary() -> str:
    """A text, and what begins each of its paragraphs."""
    source = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    points = [" ".join(point.split()) for point in re.findall(r"^- (.*?)(?=\n- |\n\n)", source, re.M | re.S)][:4]
    return "\n\n".join([*points, "In short:", *(re.split(r"(?<=[.:]) ", point)[0] for point in points)])


# key -> the text in words, how it is made, and whether its last words are taken
TEXTS = {
    "code": ("code", code, False),
    "json": ("JSON", structured, False),
    "summary": ("a summary of its source", summary, True),
}


def excerpt(key: str, length: int, vocabulary: int, special: int) -> tuple[int, ...]:
    """`length` tokens of a text: its words are numbered as they come first, after `special` ids."""
    _, make, last = TEXTS[key]
    words = _WORD.findall(make())
    words = words[-length:] if last else words[:length]
    known = {word: place for place, word in enumerate(dict.fromkeys(words))}
    return tuple(special + known[word] % (vocabulary - special) for word in words)
