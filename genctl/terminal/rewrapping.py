"""Whether a terminal rewraps lines that no longer fit when its window becomes narrower. Imports nothing slow.

Most terminals do, which takes more rows; others cut the lines off. A program cannot ask which, so terminals that wrap
are recognised by their environment variables. TERM alone comes through ssh.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False  # `typing` takes longer than all of this
if TYPE_CHECKING:
    from collections.abc import Mapping

# Set by terminals that wrap.
WRAPPING = (
    "ALACRITTY_WINDOW_ID",
    "GHOSTTY_RESOURCES_DIR",
    "KITTY_WINDOW_ID",
    "KONSOLE_VERSION",
    "TMUX",
    "VTE_VERSION",
    "WEZTERM_EXECUTABLE",
    "WT_SESSION",
)
PROGRAMS = ("Apple_Terminal", "iTerm.app", "iTerm2", "vscode", "WezTerm", "ghostty")
TERMS = ("alacritty", "foot", "tmux", "wezterm", "xterm-ghostty", "xterm-kitty")


def wraps(environ: Mapping[str, str] | None = None) -> bool:
    """Whether this terminal rewraps lines when its window becomes narrower."""
    variables = os.environ if environ is None else environ
    if variables.get("STY") and not variables.get("TMUX"):  # GNU screen cuts, whatever terminal it runs in
        return False
    programs = variables.get("TERM_PROGRAM"), variables.get("LC_TERMINAL")
    named = any(program in PROGRAMS for program in programs)
    return named or any(variables.get(name) for name in WRAPPING) or variables.get("TERM", "").startswith(TERMS)


def rows(cells: int, width: int) -> int:
    """The rows that a line of so many cells takes where lines wrap."""
    return max(-(-cells // max(width, 1)), 1)
