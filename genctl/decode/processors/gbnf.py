"""GBNF, the grammars of llama.cpp, as Lark.

llguidance converts the syntax. Its converter makes terminals of rules, which are read greedily and would refuse texts
that GBNF allows; here they are rules again.
"""

from __future__ import annotations

import re

from genctl.errors import UsageError, one_line

_PART = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\\n])*/|//[^\n]*|[A-Za-z_][A-Za-z0-9_]*')
_CODE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8}))|\\.", re.DOTALL)
_ANY = "/./"


def is_gbnf(text: str) -> bool:
    """Whether a grammar is in GBNF: its rules are written with `::=`, and it begins at `root`."""
    return re.search(r"^\s*root\s*::=", text, re.MULTILINE) is not None


def lark_of(text: str, where: str) -> str:
    """The grammar in Lark. Raises UsageError, which begins with `where`."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        lark: str = gbnf_to_lark(_CODE.sub(_character, text))
    except Exception as error:  # the converter raises plain exceptions
        reason = one_line(error) if str(error) else "it ends too early"
        raise UsageError(f"{where}: not GBNF: {reason}") from error
    return _PART.sub(_rule, lark.partition("\n")[2])


def _character(match: re.Match[str]) -> str:
    code = next((one for one in match.groups() if one), None)
    character = chr(int(code, 16)) if code and int(code, 16) < 0x110000 else ""
    if not character or not character.isprintable() or character in '"\\[]^-/':
        return match[0]
    return character


def _rule(match: re.Match[str]) -> str:
    part = match[0]
    if part == _ANY:
        return "/(?s:.)/"
    return part if part[0] in '"/' else part.lower()
