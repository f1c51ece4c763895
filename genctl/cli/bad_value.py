"""Mistakes on a command line in plain words: what was expected, what was typed, and what was meant."""

from __future__ import annotations

import re
from collections.abc import Sequence

from genctl.errors import nearest

# Words of the command-line parser -> the type that it expects.
_EXPECTED = {"valid integer": "a whole number", "valid number": "a number", "valid boolean": "true or false"}


# What the parser says -> what genctl says.
_SENTENCES = {
    r"No such option: (.*)": 'no such option "{}"',
    r"Option '(.*)' requires an argument\.": "{} needs a value",
    r"Option '(.*)' does not take a value\.": "{} takes no value",
    r"Missing argument '(.*)'\.": "{} is missing",
    r"Got unexpected extra argument(?:s|\(s\))? \((.*)\)": "unexpected: {}",
}


def plain_words(message: str, arguments: Sequence[str]) -> str:
    """The parser's `message` about `arguments`, in plain words; a message about anything else is returned as it is."""
    for pattern, sentence in _SENTENCES.items():
        if match := re.fullmatch(pattern, message, re.DOTALL):
            return sentence.format(match[1])
    match = re.fullmatch(r"Invalid value for (.+?): (.*)", message, re.DOTALL)
    if match is None:
        return message
    names, reason = re.findall(r"'([^']+)'", match[1]) or [match[1]], match[2].removeprefix("Value error, ")
    choice = re.fullmatch(r"'(.*)' is not one of (.*?)\.?", reason, re.DOTALL)
    if choice:
        choices = re.findall(r"'([^']*)'", choice[2])
        near = nearest(choice[1].lower(), choices)
        expected = f"must be one of {', '.join(choices)}"
        return f'{names[0]} "{choice[1]}": ' + (f"did you mean {near}? It {expected}" if near else expected)
    expected = next((words for foreign, words in _EXPECTED.items() if foreign in reason), "")
    if not expected:
        return f"{names[0]}: {reason}"
    return f"{names[0]}: expected {expected}" + _value_typed(names, arguments)


def _value_typed(names: Sequence[str], arguments: Sequence[str]) -> str:
    """The value of the option in `arguments`, as the end of a sentence."""
    for place, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name in names and (equals or place + 1 < len(arguments)):
            return f', got "{value if equals else arguments[place + 1]}"'
    return ""
