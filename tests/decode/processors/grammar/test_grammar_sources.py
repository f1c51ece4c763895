"""What is wrong with a grammar is said in one sentence, with its place, before anything is loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import genctl
from genctl.config.modes import conflicts
from genctl.decode.processors import grammar_source
from genctl.decode.processors.grammar_source import read
from genctl.errors import UsageError
from genctl.params import Generation
from tests.decode.processors.grammar.machines import allowed, machine
from tests.tiny import tokenizer


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"regex": "(ab"}, 'regex: unclosed group at character 1 of "(ab"'),
        ({"regex": "ab**("}, 'regex: unclosed group at character 5 of "ab**("'),
        ({"regex": "a(?=b)"},
         'regex: look-around, including look-ahead and look-behind, is not supported at character 2 of "a(?=b)"'),
        ({"regex": "a$b"}, 'regex: lookarounds not supported yet; End in "a$b"'),
        ({"regex": ""}, "regex: the pattern is empty, and so would be the text"),
        ({"grammar": 'start: "a" foo'}, 'grammar, line 1, column 8: unknown name: "foo"'),
        ({"grammar": "/nowhere.lark"}, "grammar: cannot read /nowhere.lark: no such file"),
        ({"json_schema": '{"a":'}, "json_schema: not JSON: expected a value at column 6"),
        ({"json_schema": {"properties": {"a": {"items": {"type": "strin"}}}}}, "json_schema: Invalid type: strin"),
        ({"json_schema": {"anyOf": [{"type": "integer", "minimum": 5, "maximum": 3}]}},
         "json_schema: Unsatisfiable schema: minimum (5) is greater than maximum (3)"),
        ({"json_schema": {"minimum": "3"}}, "json_schema: Expected a number for 'minimum', got \"3\""),
        ({"json_schema": {"properties": {"a": {"maxLength": 2.5}}}},
         "json_schema: Expected positive integer for 'maxLength', got 2.5"),
        ({"json_schema": {"required": "a"}}, "json_schema: Expected array for 'required', got \"a\""),
        ({"grammar": 'root ::= "a" foo'}, "grammar: not GBNF: Rule 'foo' not found"),
        ({"json_schema": {"type": "string", "pattern": "("}}, "json_schema: pattern: unclosed group"),
        ({"json_schema": {"x-guidance": 3}}, 'json_schema: "x-guidance" must be an object'),
    ],
)  # fmt: skip
def test_a_grammar_that_does_not_parse_is_refused_with_the_reason(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(Generation(**knobs))
    assert caught.value.message == message


@pytest.mark.parametrize(
    ("schema", "message", "guidance", "note"),
    [
        ({"not": {}}, 'unsupported keywords ["not"]', "lenient", 'unsupported keywords ["not"]'),
        ({"if": {}, "then": {}}, 'unsupported keywords ["if", "then"]', "lenient", "unsupported keywords"),
        ({"type": "string", "format": "color"}, "Unknown format: color", "lenient", "Unknown format: color"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf whose parts may overlap is not supported",
         "coerce_one_of", "oneOf, which is read as anyOf"),
    ],
)  # fmt: skip
def test_what_llguidance_lacks_is_refused_by_name_or_left_out_with_a_note(
    schema: dict[str, Any], message: str, guidance: str, note: str
) -> None:
    with pytest.raises(UsageError) as caught:
        read(Generation(json_schema={"properties": {"a": schema}}))
    assert caught.value.message == f"json_schema: {message}"
    assert f'"x-guidance": {{"{guidance}": true}}' in caught.value.hint
    source = read(Generation(json_schema={**schema, "x-guidance": {guidance: True}}))
    assert source is not None
    assert source.notes[0].startswith(f"json_schema: not enforced: {note}")


def test_white_space_other_keys_and_anchors() -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}}
    assert machine(json_schema=schema).accepts(tokenizer().encode('{"b":1}'))
    assert not machine(json_schema={**schema, "additionalProperties": False}).accepts(tokenizer().encode('{"b":1}'))
    spaced = tokenizer().encode('{"a": 1}')
    schema = {"properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    assert machine(json_schema=schema).accepts(spaced)
    assert not machine(json_schema={**schema, "x-guidance": {"whitespace_flexible": False}}).accepts(spaced)
    assert allowed(machine(regex="^ab$"), ()) == allowed(machine(regex="ab"), ())
    assert read(Generation()) is None
    assert read(Generation(regex="a"), "grammar") is None


def test_files_are_read_and_named(tmp_path: Path) -> None:
    schema, lark = tmp_path / "s.json", tmp_path / "g.lark"
    schema.write_text('{"enum": ["a"]}')
    lark.write_text('start: "a" b\nb: c\n')
    assert machine(json_schema=str(schema)).accepts(tokenizer().encode('"a"'))
    with pytest.raises(UsageError) as caught:
        read(Generation(grammar=str(lark)))
    assert caught.value.message == f'grammar ({lark}), line 2, column 4: unknown name: "c"'
    schema.write_text("[1,")
    with pytest.raises(UsageError, match="not JSON"):
        read(Generation(json_schema=str(schema)))
    schema.write_text("[1]")
    with pytest.raises(UsageError, match=r"a schema is a JSON object, true or false, not \[1\]"):
        read(Generation(json_schema=str(schema)))
    schema.write_bytes(b"\xff")
    with pytest.raises(UsageError, match="not UTF-8 text"):
        read(Generation(json_schema=str(schema)))


def test_rows_share_a_grammar_that_is_read_once_until_its_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []
    validate = grammar_source.validate
    monkeypatch.setattr(grammar_source, "validate", lambda lark: tried.append(lark) or validate(lark))
    file = tmp_path / "ids.json"
    file.write_text('{"type": "integer"}')
    prompts = ["once", "upon", "a time"]
    model = genctl.load("builtin:stories")
    for knobs in ({"json_schema": str(file)}, {"regex": "[a-z]{3,5}!"}, {"json_schema": {"enum": ["cat", "dog"]}}):
        tried.clear()
        model.generate(prompts, max_new_tokens=8, **knobs)
        assert len(tried) == 1
    assert all(
        row.text.strip("-").isdigit() for row in model.generate(prompts, max_new_tokens=8, json_schema=str(file))
    )
    file.write_text('{"type": "boolean"}')
    assert {row.text for row in model.generate(prompts, max_new_tokens=8, json_schema=str(file))} <= {"true", "false"}


@pytest.mark.parametrize("schema", [True, "true", " true\n", "{}", {}])
def test_true_and_the_empty_schema_allow_any_json(schema: Any) -> None:
    for text in ("[1]", '"a"', "null", '{"b":2}'):
        assert machine(json_schema=schema).accepts(tokenizer().encode(text))


@pytest.mark.parametrize("schema", [False, "false"])
def test_false_is_a_schema_that_allows_nothing(schema: Any) -> None:
    with pytest.raises(UsageError, match="json_schema: the schema false allows no text at all"):
        read(Generation(json_schema=schema))


def test_a_file_may_be_named_like_a_schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("true").write_text('{"enum": ["a"]}')
    Path("false").write_text("true")
    assert not machine(json_schema="./true").accepts(tokenizer().encode("1"))
    assert machine(json_schema="./false").accepts(tokenizer().encode("1"))
    assert machine(json_schema="true").accepts(tokenizer().encode("1"))


def test_what_contradicts_each_other_is_told() -> None:
    assert conflicts(Generation(regex="a")) == []
    assert conflicts(Generation(regex="a", json_schema={}, grammar="x")) == [
        "json_schema and regex both say what the text must be; leave out one of them",
        "json_schema and grammar both say what the text must be; leave out one of them",
    ]
    found = conflicts(Generation(regex="a", token_healing=True, stop_regex="b"))
    assert [sentence.split(":")[0] for sentence in found] == [
        "token_healing cannot be combined with regex",
        "token_healing cannot be combined with stop_regex",
    ]


def test_grammars_are_checked_without_torch() -> None:
    code = (
        "import sys; from genctl.decode.processors.grammar_source import read; from genctl.params import Generation;"
        "read(Generation(json_schema={})); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


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
