"""GBNF grammars have the texts that llama.cpp gives them."""

from __future__ import annotations

from pathlib import Path

import pytest

from genctl.errors import UsageError
from tests.decode.processors.grammar.machines import machine
from tests.tiny import tokenizer

JSON = r"""
root   ::= object  # a comment
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4})
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9])? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""


@pytest.mark.parametrize(
    ("grammar", "texts", "others"),
    [
        ('root ::= word "b"\nword ::= [a-b]+', ["aab", "ab", "bb"], ["b", "aa"]),  # words do not take the last b
        ('root ::= "yes" | "no"', ["yes", "no"], ["y", "yesno"]),
        ('root ::= (item ", ")* item\nitem ::= [A-Z] [a-z]{1,3}', ["Ab", "Ab, Cde"], ["A", "Abcde", "Ab, "]),
        (r'root ::= "\x41" [\u0042-\u0044] "\u00e9" "\""', ['ABé"', 'ADé"'], ["ABé", 'AEé"']),
        ("root ::= .", ["a", "\n", "é"], ["", "ab"]),
        ('root ::= "a"{2,}', ["aa", "aaa"], ["a"]),
        ('my-Rule ::= "a"\nroot ::= my-Rule? "b"', ["ab", "b"], ["a"]),
        (JSON, ['{"a": [1, "x\\n", null]}', "{}"], ["[1]", '{"a"}']),
    ],
)
def test_the_same_texts(grammar: str, texts: list[str], others: list[str]) -> None:
    made = machine(grammar=grammar)
    assert all(made.accepts(tokenizer().encode(text)) for text in texts)
    assert not any(made.accepts(tokenizer().encode(text)) for text in others)


def test_a_file_is_read_and_its_mistake_has_the_name(tmp_path: Path) -> None:
    file = tmp_path / "g.gbnf"
    file.write_text('root ::= "a"+')
    assert machine(grammar=str(file)).accepts(tokenizer().encode("aa"))
    for text in ('root ::= "a', 'root ::= "a\\', "root ::= [a", 'root ::= "\\q"', "root ::= )"):
        file.write_text(text)
        with pytest.raises(UsageError, match="GBNF") as caught:
            machine(grammar=str(file))
        assert caught.value.message.startswith(f"grammar ({file})")
