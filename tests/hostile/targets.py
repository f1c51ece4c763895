"""What hostile bytes are let loose on, and what must hold whatever they are.

A target takes bytes and returns what became of them: "refused" or "accepted". It raises `Breach` where the contract is
broken: an exception that is no GenctlError, an exit status other than 2, a message without its place, one that could
drive a terminal or never ends, or a key that nobody knows and nobody complained about. The property tests share it.
"""

from __future__ import annotations

import os
import tempfile
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import tomli

from genctl.config import presets
from genctl.config.check import known
from genctl.config.layers import Layer, Resolved, resolve
from genctl.config.settings import environment_layer, to_toml
from genctl.config.toml import parse
from genctl.decode.processors import grammar_source as source
from genctl.errors import Exit, GenctlError
from genctl.params import Generation

_OBEYED = ("Cc", "Cs", "Zl", "Zp")  # categories of what a terminal obeys
_TURNING = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"  # and what turns text around

REFUSED, ACCEPTED = "refused", "accepted"
LONGEST = 1000  # characters in a line of a message
NAME = "job.toml"


class Breach(AssertionError):
    """The contract is broken."""


def preset(data: bytes) -> str:
    """A preset file of these bytes."""
    path = _scratch() / NAME
    path.write_bytes(data)
    before = Path.cwd()
    os.chdir(path.parent)
    try:
        resolved = resolve(presets.load([NAME]))
    except GenctlError as error:
        return _refused(error, ".toml")
    finally:
        os.chdir(before)
    told = tomli.loads(data.decode("utf-8-sig").replace("\r\n", "\n"))
    _all_known(told, resolved, allowed=("extends", "about", "processors", "stopping"))
    again = resolve([Layer(NAME, parse(to_toml(resolved), NAME))])
    if (again.generation, again.runtime) != (resolved.generation, resolved.runtime):
        raise Breach("what --dry prints is another job")
    return _grammars(resolved)


def set_option(data: bytes) -> str:
    """`--set` with this text; bytes that are no UTF-8 arrive as the interpreter hands them over."""
    text = os.fsdecode(data)
    try:
        layers = presets.parse_sets([text])
        resolved = resolve(layers)
    except GenctlError as error:
        return _refused(error, "--set")
    for layer in layers:
        _all_known(layer.values, resolved, allowed=("about", "processors", "stopping"))
    return _grammars(resolved)


def variable(data: bytes) -> str:
    """An environment variable: what precedes the first = is the end of its name."""
    name, _, value = os.fsdecode(data).partition("=")
    name = name.replace("\0", "")
    try:
        layer = environment_layer({f"GENCTL_{name}": value})
        resolved = resolve([layer])
    except GenctlError as error:
        return _refused(error, "environment" if error.message.startswith("environment") else "GENCTL_")
    _all_known(layer.values, resolved, allowed=())
    return _grammars(resolved)


def regex(data: bytes) -> str:
    """`--regex` with this pattern."""
    return _grammar("regex", data)


def json_schema(data: bytes) -> str:
    """`--json-schema` with this text (never a file's name)."""
    return _grammar("json_schema", b"{" + data)


def lark(data: bytes) -> str:
    """`--grammar` with these rules after a first one (never a file's name)."""
    return _grammar("grammar", b"start: " + data)


def stop_regex(data: bytes) -> str:
    """`--stop-regex` with this pattern, tried on a text."""
    from genctl.decode.stopping.stops import Pattern

    try:
        Pattern(os.fsdecode(data)).find("a" * 30 + "!")
    except GenctlError as error:
        return _refused(error, "regular expression")
    return ACCEPTED


TARGETS: dict[str, Callable[[bytes], str]] = {
    "preset": preset, "set": set_option, "environment": variable, "regex": regex, "json-schema": json_schema,
    "grammar": lark, "stop-regex": stop_regex,
}  # fmt: skip


def checked(target: Callable[[bytes], str], data: bytes) -> str:
    """What became of `data`. Raises Breach for every exception that is none of ours."""
    try:
        return target(data)
    except Breach:
        raise
    except Exception as error:
        raise Breach(f"{type(error).__name__}: {error}"[:300]) from error


def _grammar(knob: str, data: bytes) -> str:
    try:
        made = source.read(Generation(**{knob: os.fsdecode(data)}))
    except GenctlError as error:
        return _refused(error, knob)
    if made is None:
        raise Breach(f"{knob} was not read at all")
    return ACCEPTED


def _grammars(resolved: Resolved) -> str:
    """What a run looks at before it loads anything. Files are left alone: theirs is another test."""
    generation = resolved.generation
    for knob in ("json_schema", "grammar"):
        value = getattr(generation, knob)
        if isinstance(value, str) and not value.lstrip().startswith(("{", "start:")):
            return ACCEPTED
    from genctl.engines.session import check_settings

    try:
        check_settings(generation)
    except GenctlError as error:
        return _refused(error, "")
    return ACCEPTED


def _refused(error: GenctlError, place: str) -> str:
    if error.exit != Exit.USAGE:
        raise Breach(f"exit status {int(error.exit)}: {error.message[:200]!r}")
    lines = error.message.split("\n")
    if len(lines) > 102:
        raise Breach(f"{len(lines)} lines")
    for line in lines:
        _sentence(line, "" if line.startswith("… and ") else place)
    return REFUSED


def _sentence(line: str, place: str) -> None:
    """Raises Breach unless `line` is one line that says where, that ends, and that drives no terminal."""
    from genctl.terminal.widgets import visible

    shown = visible(line).replace("\t", " ")
    if not line.strip() or place not in line:
        raise Breach(f"no place {place!r} in {line[:200]!r}")
    if len(line) > LONGEST:
        raise Breach(f"{len(line)} characters: {line[:200]!r}…")
    if "\n" in line or any(unicodedata.category(mark) in _OBEYED or mark in _TURNING for mark in shown):
        raise Breach(f"cannot be shown: {line[:200]!r}")


def _all_known(told: Mapping[str, Any], resolved: Resolved, *, allowed: tuple[str, ...]) -> None:
    """Raises Breach unless every key is one that somebody knows and that came through to the job."""
    for key, value in told.items():
        if key in allowed:
            continue
        if key not in known():
            raise Breach(f"accepted in silence: {key[:80]!r}")
        kind = known()[key][0]
        holder = resolved.generation if kind is Generation else resolved.runtime
        if resolved.origins[key] == "default" and getattr(holder, key) != getattr(kind(), key):
            raise Breach(f"lost in silence: {key} = {value!r:.80}")


_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []


@cache
def _scratch() -> Path:
    _FOLDERS.append(tempfile.TemporaryDirectory(prefix="genctl-hostile-"))
    return Path(_FOLDERS[0].name)


def seeds(target: str) -> Iterator[bytes]:
    """Sound inputs, which tests change."""
    if target == "preset":
        yield from (path.read_bytes() for path in sorted(presets.shipped_folder().glob("*.toml")))
    yield from {
        "preset": [b"[[processors]]\nuse = 'top_k'\n"],
        "set": [b"top_k=5", b'logit_bias={" a" = 1.0}', b"stop_strings=['a', 'b']"],
        "environment": [b"TOP_K=5", b"MODEL=x"],
        "regex": [b"[a-z]+( [a-z]+)*", b"(?i)yes|no"],
        "json-schema": [
            b'"type": "object", "properties": {"a": {"enum": [1, 2]}}}',
            b'"$ref": "#/$defs/a", "$defs": {"a": {}}}',
        ],
        "grammar": [b'"a" b\nb: /[0-9]+/ | "c" b', b'%json {"type": "integer"}'],
        "stop-regex": [b"(a|b)+!", b"\\d{3}"],
    }[target]
