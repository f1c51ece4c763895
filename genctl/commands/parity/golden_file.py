"""Golden files: what a reference computes, so that another side can be compared with it later.

JSON lines, so that a difference can be read: a head, a line for each text, below it one for each position, and a last
line with the checksum of all others. A position has the log-probabilities of the best tokens (`TOP` of them at most, as
float32 numbers) and the probability of all others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from genctl.errors import InputError, printable, reason_of
from genctl.events import row_name
from genctl.io.records import SCHEMA
from genctl.io.strict_json import once
from genctl.io.writers import to_json
from genctl.parity.recorded import Golden, KnownTop
from genctl.parity.values import Text

KIND = "golden"
VERSION = 1
HINT = "genctl parity MODEL --save FILE writes a golden file"


def content(golden: Golden, text_of: Callable[[int], str]) -> bytes:
    """The file. `text_of` gives the text of a token, for people who read it."""
    lines = [to_json(line) for line in _lines(golden, text_of)]
    body = "".join(f"{line}\n" for line in lines).encode()
    end = {"kind": "end", "lines": len(lines), "sha256": hashlib.sha256(body).hexdigest()}
    return body + f"{to_json(end)}\n".encode()


def _lines(golden: Golden, text_of: Callable[[int], str]) -> Iterator[dict[str, Any]]:
    yield {
        "schema": SCHEMA,
        "kind": KIND,
        "version": VERSION,
        "reference": golden.reference,
        "fingerprint": golden.fingerprint,
        "dtype": golden.dtype,
        "knobs": dict(golden.knobs),
        "vocabulary": golden.vocabulary,
        "written": golden.written,
        "new_tokens": golden.new_tokens,
        "texts": len(golden.texts),
        "versions": dict(golden.versions),
    }
    for text in golden.texts:
        own = {"new_tokens": golden.own_lengths[text.id]} if text.id in golden.own_lengths else {}
        yield {"kind": "text", "id": text.id, "prompt": text.prompt, "prompt_ids": list(text.prompt_ids), **own}
        for index, token in enumerate(text.token_ids):
            known = golden.known[text.id, index]
            yield {
                "token": token,
                "text": text_of(token),
                "logprob": _short(known.logprob),
                "top": [[id, _short(value)] for id, value in known.top],
                "tail": _short(known.tail),
            }


def _short(value: float) -> float:
    """The shortest decimal that is the same float32."""
    import numpy

    return float(str(numpy.float32(value)))


def read(path: str) -> Golden:
    """A golden file. Raises InputError, which names it, for one that is damaged or something else."""
    name = printable(path)
    try:
        data = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise InputError(f"--expect: {reason_of(error)}: {name}", hint=HINT) from None
    lines = data.split(b"\n")
    head = _object(lines[0])
    if head.get("schema") != SCHEMA or head.get("kind") != KIND:
        raise InputError(f"--expect: {name} is no golden file of {SCHEMA}", hint=HINT)
    if head.get("version") != VERSION:
        raise InputError(f"--expect: {name} is a golden file of version {head.get('version')!r:.20}; this is {VERSION}")
    if lines[-1] != b"" or len(lines) < 3:
        raise InputError(f"--expect: {name} is cut off: it has no last line")
    end = _object(lines[-2])
    if end.get("kind") != "end":
        raise InputError(f"--expect: {name} is cut off: it has no checksum in line {len(lines) - 1}")
    body = data[: len(data) - len(lines[-2]) - 1]
    if end.get("sha256") != hashlib.sha256(body).hexdigest():
        raise InputError(f"--expect: {name} is damaged: its checksum is that of other lines", hint=HINT)
    try:
        return _golden(head, [_object(line) for line in lines[1:-2]])
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise InputError(f"--expect: {name} lacks what a golden file has: {printable(str(error)):.80}") from None


def _object(line: bytes) -> dict[str, Any]:
    """The object of a line, empty if there is none."""
    try:
        found = json.loads(line.decode("utf-8"), object_pairs_hook=once)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


@dataclass
class _OpenText:
    """A text whose positions follow."""

    id: str
    prompt: str
    prompt_ids: tuple[int, ...]
    new_tokens: int | None = None
    tokens: list[int] = field(default_factory=list)


def _golden(head: Mapping[str, Any], lines: list[dict[str, Any]]) -> Golden:
    texts: list[_OpenText] = []
    known: dict[tuple[str, int], KnownTop] = {}
    for line in lines:
        if line.get("kind") == "text":
            own = int(line["new_tokens"]) if "new_tokens" in line else None
            texts.append(_OpenText(str(line["id"]), str(line["prompt"]), tuple(map(int, line["prompt_ids"])), own))
            continue
        text = texts[-1]
        top = tuple((int(id), float(value)) for id, value in line["top"])
        if not top:
            raise ValueError("a position without tokens")
        known[text.id, len(text.tokens)] = KnownTop(
            _widened(line["logprob"]), tuple((id, _widened(value)) for id, value in top), _widened(line["tail"])
        )
        text.tokens.append(int(line["token"]))
    if len(texts) != head["texts"] or not known:
        raise ValueError("as many texts as its head says")
    return Golden(
        reference=str(head["reference"]),
        fingerprint=str(head["fingerprint"]),
        dtype=str(head["dtype"]),
        knobs=dict(head["knobs"]),
        vocabulary=int(head["vocabulary"]),
        written=bool(head["written"]),
        new_tokens=None if head["new_tokens"] is None else int(head["new_tokens"]),
        versions=dict(head["versions"]),
        texts=tuple(
            Text(
                one.id,
                one.prompt_ids,
                tuple(one.tokens),
                one.prompt,
                row_name(one.id, number + 1 if one.id == str(number) else 0),
            )
            for number, one in enumerate(texts)
        ),
        known=known,
        own_lengths={one.id: one.new_tokens for one in texts if one.new_tokens is not None},
    )


def _widened(value: Any) -> float:
    import numpy

    return float(numpy.float32(value))
