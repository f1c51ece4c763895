"""`[NAME=]WHAT[@setting=value,…]`: where each part ends, what WHAT is, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from genctl.config.sides import Kind, read, split
from genctl.errors import GenctlError, UsageError

COMPARE: tuple[Kind, ...] = ("server", "mode", "preset", "file", "checkpoint")
PARITY: tuple[Kind, ...] = ("server", "file", "checkpoint", "mode", "preset")


@pytest.mark.parametrize(
    ("text", "what", "settings"),
    [
        ("./model", "./model", ""),
        ("./model@dtype=float32", "./model", "dtype=float32"),
        ("./m@v2/x@dtype=float32,threads=2", "./m@v2/x", "dtype=float32,threads=2"),
        ("@threads=1", "", "threads=1"),
        ("org/name@main", "org/name@main", ""),
        ("openai:http://me@host:8000@model=tiny", "openai:http://me@host:8000", "model=tiny"),
        ("m@adapter=./a@b=c", "m", "adapter=./a@b=c"),
        ("m@ threads = 1", "m", " threads = 1"),
        ("m@threads", "m@threads", ""),
    ],
)
def test_what_ends_at_the_first_at_sign_with_a_name_and_an_equals_sign(text: str, what: str, settings: str) -> None:
    assert split(text) == (what, settings)


@pytest.mark.parametrize(
    ("text", "name", "kind", "settings"),
    [
        ("greedy", "greedy", "mode", {"do_sample": False, "num_beams": 1}),
        ("wide=beam@num_beams=8", "wide", "mode", {"do_sample": False, "num_beams": 8}),
        ("nucleus@top-p=0.5", "nucleus@top-p=0.5", "preset", {"top_p": 0.5}),
        ("hot=presets/creative.toml", "hot", "preset", {}),
        ("presets/creative.toml", "creative", "preset", {}),
        ("builtin:stories@cache=static", "builtin:stories@cache=static", "checkpoint",
         {"model": "builtin:stories", "cache_implementation": "static"}),
        ("./runs/lr=0.1/model", "./runs/lr=0.1/model", "checkpoint", {"model": "./runs/lr=0.1/model"}),
        ("it=org/name@main", "it", "checkpoint", {"model": "org/name@main"}),
        ("there=openai:http://h@model=tiny", "there", "server", {"backend": "openai:http://h", "model": "tiny"}),
        ("old.json", "old.json", "file", {}),
        ("a=@json_schema=schema.json", "a", None, {"json_schema": "schema.json"}),
    ],
)  # fmt: skip
def test_a_side_has_a_name_a_kind_and_settings(
    text: str, name: str, kind: str | None, settings: dict[str, Any]
) -> None:
    side = read(text, "--strategy", COMPARE, colon=True)
    assert (side.name, side.kind, dict(side.settings)) == (name, kind, settings)


@pytest.mark.parametrize(
    ("text", "name", "values"),
    [
        ("beam5:num_beams=5,length_penalty=0.6", "beam5", {"num_beams": 5, "length_penalty": 0.6}),
        ("plain:", "plain", {}),
        ("my own:num_beams=2", "my own", {"num_beams": 2}),
        ('a:stop_strings=["x, y", "z"],do_sample=true', "a", {"stop_strings": ["x, y", "z"], "do_sample": True}),
        ("a:stop_strings='x,y'", "a", {"stop_strings": "x,y"}),
        ("a:stop_strings=don't,num_beams=2", "a", {"stop_strings": "don't", "num_beams": 2}),
        ('a:logit_bias={" yes": 2.0, "#12": -1},top-k=3', "a", {"logit_bias": {" yes": 2.0, "#12": -1}, "top_k": 3}),
        ('a:logit_bias={" yes" = 2.0}', "a", {"logit_bias": {" yes": 2.0}}),
        ("a:max_time=null", "a", {"max_time": None}),
        (r'a:stop_strings="say \"a,b\"",num_beams=2', "a", {"stop_strings": 'say "a,b"', "num_beams": 2}),
        ("a:early_stopping=never", "a", {"early_stopping": "never"}),
    ],
)
def test_a_colon_behind_a_name_begins_settings_too(text: str, name: str, values: dict[str, Any]) -> None:
    for written in (text, text.replace(":", "=@", 1)):
        if "=@" in written and (" " in name or not values):
            continue
        side = read(written, "--strategy", COMPARE, colon=True)
        assert (side.name, side.kind, side.presets, dict(side.settings)) == (name, None, (), values)


def test_a_name_is_a_way_to_decode_or_a_checkpoint_by_what_the_command_compares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "greedy").mkdir()
    monkeypatch.chdir(tmp_path)
    assert read("greedy", "--strategy", COMPARE).kind == "mode"
    assert read("greedy", "side", PARITY, bare="checkpoint").kind == "checkpoint"
    assert read("gpt2", "side", PARITY, bare="checkpoint").settings == {"model": "gpt2"}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("num_beams=5", "begins with no name"),
        (":num_beams=5", "begins with no name"),
        ("=beam", "begins with no name"),
        ("", "names neither a model nor a setting"),
        ("a/b:num_beams=5", "a name has"),
        ("a b=beam", "a name has"),
        ("a:num_beams", "not setting=value"),
        ("a:num_beams=1,,top_k=2", "not setting=value"),
        ("a:num_beams=5,num_beams=6", "given twice"),
        ("a:stop_strings=[1,2", "bracket is not closed"),
        ('a:stop_strings="x', "quote is not closed"),
        ("a:extends=3", "extends = 3: must be the name of a preset"),
        ("./a@model=b", "the model is given twice, as ./a and as model = b"),
        ("old.json@seed=1", "a file of results was run already"),
        ("x=old.json", "a file of results was run already"),
        ("nuclues@top_p=1", "--strategy nuclues@top_p=1: there is no such strategy; did you mean nucleus?"),
    ],
)
def test_a_side_that_cannot_be_read_says_why(text: str, sentence: str) -> None:
    with pytest.raises(GenctlError) as caught:
        read(text, "--strategy", COMPARE, colon=True)
    assert sentence in caught.value.message


def test_a_name_that_is_nothing_says_what_there_is() -> None:
    hint = _hint(COMPARE)
    assert "a server" not in _hint(("mode", "server", "preset", "checkpoint"), refused={"server": "it is far away"})
    for kind in ("greedy, sample, beam", "a preset", "a checkpoint", "a server (openai:URL)", "a file of results"):
        assert kind in hint


def _hint(kinds: tuple[Kind, ...], **how: Any) -> str:
    with pytest.raises(UsageError) as caught:
        read("nothing", "--strategy", kinds, **how)
    return caught.value.hint
