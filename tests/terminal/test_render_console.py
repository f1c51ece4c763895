"""Who is a terminal, who gets colour, who may be animated: judged per stream."""

from __future__ import annotations

import io
import subprocess
import sys
from typing import Literal

import pytest
from rich.text import Text

from genctl.terminal.console import discard, make_consoles


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def paint(color: Literal["auto", "always", "never"], stream: io.StringIO, environ: dict[str, str]) -> tuple[bool, bool]:
    """Whether a bold red word gets escape codes on this stream, and whether it may be animated."""
    out, _ = make_consoles(color, stdout=stream, stderr=io.StringIO(), environ=environ)
    out.print(Text("word", style="bold red"))
    assert "word" in stream.getvalue()
    return "\x1b[" in stream.getvalue(), out.is_interactive


XTERM = {"TERM": "xterm-256color"}
DUMB = {"TERM": "dumb"}


@pytest.mark.parametrize(
    ("color", "environ", "on_terminal", "on_pipe"),
    [
        ("auto", XTERM, (True, True), (False, False)),
        ("auto", {**XTERM, "NO_COLOR": "1"}, (False, True), (False, False)),
        ("auto", {**XTERM, "NO_COLOR": ""}, (True, True), (False, False)),
        ("auto", {**XTERM, "FORCE_COLOR": "1"}, (True, True), (True, False)),
        ("auto", {**XTERM, "FORCE_COLOR": ""}, (True, True), (False, False)),
        ("auto", {**XTERM, "FORCE_COLOR": "1", "NO_COLOR": "1"}, (False, True), (False, False)),
        ("auto", DUMB, (False, False), (False, False)),
        ("auto", {**DUMB, "FORCE_COLOR": "1"}, (True, False), (True, False)),
        ("auto", {"TTY_COMPATIBLE": "1", "TTY_INTERACTIVE": "1"}, (True, True), (False, False)),
        ("always", {**XTERM, "NO_COLOR": "1"}, (True, True), (True, False)),
        ("always", DUMB, (True, False), (True, False)),
        ("always", {}, (True, True), (True, False)),
        ("never", {**XTERM, "FORCE_COLOR": "1"}, (False, True), (False, False)),
    ],
)
def test_colour_and_animation(
    color: Literal["auto", "always", "never"],
    environ: dict[str, str],
    on_terminal: tuple[bool, bool],
    on_pipe: tuple[bool, bool],
) -> None:
    assert paint(color, Screen(), environ) == on_terminal
    assert paint(color, io.StringIO(), environ) == on_pipe


def test_each_stream_is_judged_alone() -> None:
    out, err = make_consoles("auto", stdout=io.StringIO(), stderr=Screen(), environ=XTERM)
    assert not out.is_terminal
    assert err.is_terminal


def test_markup_emoji_and_long_lines_are_left_alone() -> None:
    stream = io.StringIO()
    out, _ = make_consoles("auto", stdout=stream, stderr=io.StringIO(), environ={"COLUMNS": "20"})
    out.print("[bold]:smile:[/bold] 'x' 123 " + "word " * 20 + "end")
    assert stream.getvalue() == "[bold]:smile:[/bold] 'x' 123 " + "word " * 20 + "end\n"


def test_a_narrow_encoding_shows_escapes_and_does_not_fail() -> None:
    raw = io.BytesIO()
    out, _ = make_consoles("auto", stdout=io.TextIOWrapper(raw, encoding="ascii"), stderr=io.StringIO(), environ={})
    out.print("é ▸")
    out.file.flush()
    assert raw.getvalue() == b"\\xe9 \\u25b8\n"


def test_a_closed_stream_is_no_terminal() -> None:
    stream = io.StringIO()
    stream.close()
    out, _ = make_consoles("auto", stdout=stream, stderr=io.StringIO(), environ=XTERM)
    assert not out.is_terminal


def test_the_room_never_imports_torch() -> None:
    rooms = "genctl.commands.run.run_view, genctl.terminal.console, genctl.terminal.explain"
    code = f"import sys, {rooms}; sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_what_is_discarded_is_not_remembered() -> None:
    nowhere = discard()
    nowhere.print("text")
    assert nowhere.file.write("token") == 5
    assert isinstance(nowhere.file, io.StringIO)
    assert nowhere.file.getvalue() == ""
