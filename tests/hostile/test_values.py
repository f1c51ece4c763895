"""Documents with one wrong value: read as before, or refused in one line that names the file, the line and the field.

The commands make a sound file of each kind. Each field of each kind of line is replaced by hostile values, one at a
time. Never a traceback, and a gate never passes because a number is missing or not finite.
"""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest

from genctl.commands.parity import golden_file
from genctl.errors import CheckError
from tests.cli.tool import Done, genctl
from tests.hostile import damage

STORIES = ("-m", "builtin:stories")
DROPPED = object()  # the field is not there
NAN = float("nan")
HOSTILE: tuple[Any, ...] = (
    DROPPED, None, True, False, "", "x", "\ud800", "\x1b[2J", [], {}, [[]], [None], {"a": None}, ["x"], [-1], [2**70],
    0, 1, -1, -50, 5, 2**31, 2**53, 2**63, 2**70, 10**60, 0.5, -0.5, 1e-320, 1e39, 1e308, -1e308, NAN, float("inf"),
    -float("inf"), [1, "x", -1e308], "load", "/etc", 1e9, -1e39, "float64", [0], {"event": "began"},
)  # fmt: skip
NOT_FINITE = (NAN, float("inf"), -float("inf"))
MOST = 40  # mutations of a kind in a run of the tests; all of them are some thousands


@dataclass(frozen=True)
class Kind:
    """A kind of document: the command that makes a sound one, and those that read it."""

    make: Callable[[Path], Done]
    read: Callable[[Path], tuple[Done, ...]]
    seal: Callable[[list[Any]], bytes] = field(default=lambda lines: _lines(lines))
    gate: bool = False  # whether status 0 says that something agrees


def _lines(lines: list[Any]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def _sealed(lines: list[Any]) -> bytes:
    body = _lines(lines[:-1])
    end = {"kind": "end", "lines": len(lines) - 1, "sha256": hashlib.sha256(body).hexdigest()}
    return body + json.dumps(end).encode() + b"\n"


def _tree(path: Path) -> Done:
    lines = "generate 2\nleft 1\ntake 2 1\nundo\ntake 2 1\nset temperature=0.7\nsample 1 2\nstart\n"
    words = ("explore", "Once upon", *STORIES, "--top-k", "50", "--script", "-", "--save", str(path), "--seed", "1")
    return genctl(*words, stdin=lines)


def _both(path: Path) -> tuple[Done, ...]:
    report = path.with_suffix(".html")
    report.unlink(missing_ok=True)
    return (genctl("report", str(path), "-o", str(report)),)


def _tree_read(path: Path) -> tuple[Done, ...]:
    again = path.with_suffix(".copy")
    script = "show\ntext\nup\ndown\nwhy\nend\ngenerate 1\nundo\n"
    again.write_bytes(path.read_bytes())
    return *_both(path), genctl("explore", "--open", str(again), "--script", "-", stdin=script)


def _chat_read(path: Path) -> tuple[Done, ...]:
    again = path.with_suffix(".copy")
    again.write_bytes(path.read_bytes())
    return (genctl("chat", "--open", str(again), *STORIES, "-n", "2", stdin="And then?\n"),)


def _resumed(path: Path) -> tuple[Done, ...]:
    path.with_suffix("").write_bytes(path.with_suffix(".whole").read_bytes())
    return (genctl(*RESUMED, "-i", str(path.parent / "in.txt"), "-o", str(path.with_suffix("")), "--resume"),)


RESUMED = ("run", *STORIES, "-n", "2", "--format", "jsonl", "--seed", "1")


def _journal(path: Path) -> Done:
    (path.parent / "in.txt").write_text("Once\nThe sea\n")
    done = genctl(*RESUMED, "-i", str(path.parent / "in.txt"), "-o", str(path.with_suffix("")), "--resume")
    path.with_suffix(".whole").write_bytes(path.with_suffix("").read_bytes())
    return done


KINDS: dict[str, Kind] = {
    "events": Kind(
        lambda path: genctl(
            *("beam", "Once upon", *STORIES, "-n", "2", "--num-beams", "2", "--top-logprobs", "2", "--explain"),
            *("--repetition-penalty", "1.1", "--events", str(path)),
        ),
        _both,
    ),
    "tree": Kind(_tree, _tree_read),
    "chat": Kind(
        lambda path: genctl("chat", *STORIES, "-n", "2", "--save", str(path), "--seed", "1", stdin="Hello\nMore\n"),
        _chat_read,
    ),
    "golden": Kind(
        lambda path: genctl("parity", "builtin:stories", "--save", str(path), "Once upon", "-n", "2"),
        lambda path: (genctl("parity", "builtin:stories", "--expect", str(path)),),
        _sealed,
        gate=True,
    ),
    "journal": Kind(_journal, _resumed),
}


def places(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a value and its parts are."""
    if before:
        yield before
    if isinstance(value, (dict, list)):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*before, key))


def mutated(value: Any, place: tuple[Any, ...], hostile: Any) -> Any:
    """The value with another one at a place."""
    made = copy.deepcopy(value)
    part = made
    for key in place[:-1]:
        part = part[key]
    if hostile is DROPPED:
        del part[place[-1]]
    else:
        part[place[-1]] = hostile
    return made


def mutations(lines: list[Any]) -> list[tuple[int, tuple[Any, ...], Any]]:
    """Each value for each field of each line; lines with the same fields once."""
    seen, found = set(), []
    for number, line in enumerate(lines):
        if isinstance(line, dict) and line.get("kind") == "end":
            continue  # made anew
        for place in places(line):
            form = (line.get("event"), line.get("kind"), tuple("*" if isinstance(key, int) else key for key in place))
            if form not in seen:
                seen.add(form)
                found += [(number, place, hostile) for hostile in HOSTILE]
    return found


def check(name: str, path: Path, done: Done, what: str, *, finite: bool) -> None:
    assert "this is a bug" not in done.err, (what, done.err)
    assert "Traceback" not in done.err, what
    assert done.status in (0, 1, 2, 3, 4), (what, done)
    lines = [line for line in done.err.splitlines() if line.startswith("error: ")]
    if done.status in (2, 3):
        assert lines, (what, done.err)
    longest = 5000 if name == "journal" else 1000  # it lists each setting that is another one
    assert all(len(line) < longest and line.isprintable() for line in lines), (what, lines)
    if KINDS[name].gate and not finite:
        assert done.status != 0, what


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[Any]]]:
    """A sound document of a kind, with its lines."""
    made: dict[str, tuple[Path, list[Any]]] = {}

    def document(name: str) -> tuple[Path, list[Any]]:
        if name not in made:
            path = tmp_path_factory.mktemp(name) / ("out.jsonl.journal" if name == "journal" else "f.jsonl")
            done = KINDS[name].make(path)
            assert done.status == 0, done.err
            content = path.read_text()
            made[name] = path, [json.loads(each) for each in content.splitlines()]
        return made[name]

    return document


def run(name: str, path: Path, lines: list[Any], number: int, place: tuple[Any, ...], hostile: Any) -> None:
    """Read the document with one value changed."""
    changed = [*lines]
    changed[number] = mutated(lines[number], place, hostile)
    path.write_bytes(KINDS[name].seal(changed))
    where = ".".join(map(str, place))
    for done in KINDS[name].read(path):
        what = f"line {number + 1}: {where} = {'(dropped)' if hostile is DROPPED else repr(hostile)[:60]}"
        check(name, path, done, what, finite=not any(hostile is value for value in NOT_FINITE))


@pytest.mark.parametrize("name", KINDS)
def test_a_sound_document_is_read(name: str, sound: Callable[[str], tuple[Path, list[Any]]]) -> None:
    path, lines = sound(name)
    path.write_bytes(KINDS[name].seal(lines))
    for done in KINDS[name].read(path):
        assert done.status == 0, done.err


@pytest.mark.parametrize("name", KINDS)
def test_one_wrong_value_is_refused_or_harmless(name: str, sound: Callable[[str], tuple[Path, list[Any]]]) -> None:
    path, lines = sound(name)
    every = mutations(lines)
    for number, place, hostile in Random(name).sample(every, min(MOST, len(every))):
        run(name, path, lines, number, place, hostile)


@pytest.mark.parametrize(
    ("name", "number", "place", "hostile", "words"),
    [
        ("events", 2, ("rows", 0, "written", 0, "logprob"), "x",
         "f.jsonl, line 3: rows.0.written.0.logprob: expected a number, got a string"),
        ("events", 2, ("rows", 0, "logprob"), -1e308,
         "f.jsonl, line 3: rows.0.logprob: expected at least -1e+40, got -1e+308"),
        ("tree", 3, ("rank",), -50, "is damaged at line 4: rank: expected at least 1, got -50"),
        ("tree", 3, ("id",), 2**70, "is damaged at line 4: id: expected at most 9223372036854775807"),
        ("tree", 3, ("id",), 1536, "is damaged: node 2: id: 1536 is none of the 1536 ids of the checkpoint"),
        ("tree", 0, ("layers", 0, "values"), None, "at line 1: layers.0.values: expected an object, got null"),
        ("golden", 0, ("dtype",), "load",
         "line 1: dtype: expected 'float32', 'bfloat16', 'float16' or 'float64', got 'load'"),
        ("golden", 0, ("knobs",), {"plugin": "x"},
         "lacks what a golden file has: line 1: knobs: unknown field 'plugin'"),
        ("golden", 0, ("knobs",), {"adapter": "/etc"},
         "the golden file says adapter /etc, and its fingerprint is that of a checkpoint with adapter none"),
        ("golden", 2, ("token",), 1536, "line 3: token: the token 1536 is beyond the vocabulary of 1536"),
        ("golden", 2, ("top", 0, 1), NAN, "line 3: not JSON: NaN is not a JSON number"),
        ("golden", 2, ("tail",), 1e39, "line 3: tail: expected at most 1.001, got 1e+39"),
        ("journal", 1, ("bytes",), -1, "at line 2, so nothing can be resumed by it: bytes: expected at least 0"),
    ],
)  # fmt: skip
def test_the_first_wrong_field_is_named(
    name: str,
    number: int,
    place: tuple[Any, ...],
    hostile: Any,
    words: str,
    sound: Callable[[str], tuple[Path, list[Any]]],
) -> None:
    path, lines = sound(name)
    changed = [*lines]
    changed[number] = mutated(lines[number], place, hostile)
    path.write_bytes(KINDS[name].seal(changed))
    done = KINDS[name].read(path)[-1]
    assert done.status == 2, done
    assert words in done.err, done.err


def test_a_side_whose_numbers_are_not_finite_agrees_with_nothing(gpt2: Path, tmp_path: Path) -> None:
    golden = tmp_path / "golden.jsonl"
    assert genctl("parity", str(gpt2), "--save", str(golden), "the cat", "-n", "2").status == 0
    broken = Path(shutil.copytree(gpt2, tmp_path / "broken"))
    damage.tensors(lambda held: held["transformer.ln_f.weight"].fill_(3e38))(broken)  # the logits overflow
    assert genctl("parity", str(broken), "--expect", str(golden)).status != 0
    with pytest.raises(CheckError):
        golden_file.check(golden, str(broken), ["the cat"], 2)


def test_what_is_not_finite_is_written_as_null() -> None:
    from genctl import events
    from genctl.config import reader

    line = json.dumps(events.to_json(events.Token(1, -float("inf"), "x")))
    assert reader.loads(line) == {"event": "token", "id": 1, "logprob": None, "text": "x"}
