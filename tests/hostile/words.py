"""A checkpoint whose words are hostile: whatever the model writes is an attack on whoever shows it."""

from __future__ import annotations

import json
import re
from pathlib import Path

from genctl.decode.processors.token_bytes import STANDINS
from tests.hostile.damage import TOKENIZER

# the window's title, the clipboard, links, pictures, questions that a terminal answers, moves, colours, and markup
HOSTILE: tuple[str, ...] = (
    "\x1b]0;owned\x07", "\x1b]2;owned\x1b\\", "\x1b]52;c;b3duZWQ=\x07", "\x1b]8;;http://evil\x1b\\click\x1b]8;;\x1b\\",
    "\x1b]1337;File=inline=1:AAAA\x07", "\x1b]10;?\x07", "\x1bP+q544e\x1b\\", "\x1b_Ga=d\x1b\\", "\x1b^pm\x1b\\",
    "\x1b[2J\x1b[H", "\x1b[31;5m", "\x1b[6n", "\x1b[?1049h", "\x1bc", "\x1b\x1b", "\x9b31m", "\x9d0;owned\x9c",
    "\x00a\x00", "\x07\x07", "\x08\x08\x08", "\x0b\x0c", "b\rc", "d\te", "f\ng", "\r\nerror: all is well\n",
    "\x7f\x7f", "\x85", "\u202egnp.exe\u202c", "\u2066a\u2069", "\u200f\u200e\u061c", "\u2028\u2029",
    "[bold red]x[/bold red]", "[link=http://evil]y[/link]", "[/]", "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>', "&quot;&#27;", "\\N\\G\\l\\\\", '"];evil[label="', "${HOME}`id`$(id)",
    "=1+1\t@SUM(A1)",
)  # fmt: skip
FIRST = 259  # its id; <pad>, <bos>, <eos> and the 256 bytes come before
EVERY = FIRST + len(HOSTILE)

OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
# What our own drawing needs: colours and attributes, cursor up and to the left, clear line and below, show and hide.
OURS = re.compile(r"\x1b\[(?:[0-9;]*m|[0-9]*[ABCDGFKJ]|\?25[lh])")


def hostile_vocabulary(folder: Path) -> Path:
    """Give the tiny checkpoint in `folder` the hostile words as its tokens from `FIRST` on."""
    stand_in = {byte: mark for mark, byte in STANDINS.items()}
    path = folder / TOKENIZER
    told = json.loads(path.read_text(encoding="utf-8"))
    words = ["<pad>", "<bos>", "<eos>", *(stand_in[byte] for byte in range(256))]
    words += ["".join(stand_in[byte] for byte in word.encode()) for word in HOSTILE]
    assert len(set(words)) == EVERY == 300
    told["model"]["vocab"] = {word: number for number, word in enumerate(words)}
    told["model"]["merges"] = []
    path.write_text(json.dumps(told), encoding="utf-8")
    return folder


def tame(shown: str) -> str:
    """`shown` without what our own drawing needs. Raises AssertionError where a terminal would obey anything else."""
    rest = OURS.sub("", shown).replace("\r\n", "\n").replace("\r", "")
    found = OBEYED.search(rest)
    assert found is None, f"{found[0]!r} in {rest[max(found.start() - 40, 0) : found.end() + 40]!r}"
    return rest
