"""Parity for programs and tests: two sides, or one side and a golden file. Settings files are not read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from genctl.commands.parity import golden_file
from genctl.commands.parity.loading import LoadedSides, check_same
from genctl.commands.parity.sides import read_side
from genctl.config.layers import Layer, Resolved
from genctl.config.sides import Side
from genctl.engines.protocol import EngineSetup, Request
from genctl.errors import InputError, count, quote
from genctl.io import writers
from genctl.models.text import detokenizer
from genctl.parity.golden import compare as compare_golden
from genctl.parity.golden import record
from genctl.parity.measure import measure
from genctl.parity.sides import LocalSide
from genctl.parity.values import Golden, Parity

NEW_TOKENS = 32  # of each prompt


@dataclass(frozen=True)
class GoldenOutcome:
    """What came of a golden file: true where the side agrees with it, or was recorded."""

    passed: bool
    words: str  # everything there is to say, in lines
    parity: Parity | None = None  # None: it was recorded
    short: str = ""  # for the place where a test fails, which shows it twice

    def __bool__(self) -> bool:
        return self.passed

    def __repr__(self) -> str:
        return f"<{self.short or self.words}>"


def compare(reference: str, other: str, prompts: Sequence[str], max_new_tokens: int = NEW_TOKENS) -> Parity:
    """Compare two sides on greedy texts of prompts. Raises GenctlError, also for a prompt that a side cannot read."""
    sides = [_read(text, max_new_tokens) for text in (reference, other)]
    with closing(LoadedSides(_setup)) as loaded:
        mine, theirs = (loaded.load(side) for side in sides)
        named = [(str(number), text) for number, text in enumerate(prompts, 1)]
        check_same(mine.session.loaded, theirs.session.loaded, named)
        one = measure(mine, theirs, _requests(mine, prompts))
    for id, reason in one.failed.items():
        raise InputError(f"text {int(id) + 1} could not be compared: {reason}")
    return one


def check_golden(
    path: Path, side: str, prompts: Sequence[str], *, update: bool, max_new_tokens: int = NEW_TOKENS
) -> GoldenOutcome:
    """Compare a side with a golden file. `update` writes a missing one, and rewrites one if every difference is a tie.

    Raises GenctlError.
    """
    name, read = path.stem, _read(side, max_new_tokens)
    golden = golden_file.read(str(path)) if path.exists() else None
    if golden is None and not update:
        raise InputError(f"golden {name}: there is no {path}", hint="pytest --genctl-update records it")
    if golden is not None and (other := _other_test(golden, prompts, max_new_tokens)):
        raise InputError(
            f"golden {name}: {path} is that of another test: {other}",
            hint="remove the file, and pytest --genctl-update records it again",
        )
    with closing(LoadedSides(_setup)) as loaded:
        here = loaded.load(read)
        if golden is not None:
            return _compared(path, golden, here, update=update)
        size = _save(path, here, _requests(here, prompts), {str(at): prompt for at, prompt in enumerate(prompts)})
        return GoldenOutcome(True, f"golden {name}: recorded, {size:,} bytes")


def _other_test(golden: Golden, prompts: Sequence[str], max_new_tokens: int) -> str:
    """What a test requests and the file does not have; "" where it has everything."""
    if golden.new_tokens != max_new_tokens:
        return f"max_new_tokens is {max_new_tokens}, in the file {golden.new_tokens}"
    if len(golden.texts) != len(prompts):
        return f"{count(len(prompts), 'prompt')}, in the file {len(golden.texts)}"
    for at, (now, text) in enumerate(zip(prompts, golden.texts, strict=True), 1):
        if now != text.prompt:
            return f"prompt {at} is {quote(now)}, in the file {quote(text.prompt)}"
    return ""


def _compared(path: Path, golden: Golden, side: LocalSide, *, update: bool) -> GoldenOutcome:
    golden_file.check_same(golden, side)
    one = compare_golden(golden, side)
    name, why = f"golden {path.stem}", golden_file.not_tied(one)
    sides = f"{side.name} against {path.name}, which has {golden.reference}"
    notes = "".join(f"\nnote: {note}" for note in (sides, *one.notes))
    if update and why:
        return GoldenOutcome(False, f"{name} stays as it is: {why}{notes}", one, f"{name} stays as it is")
    if update:
        requests, _ = golden_file.again(golden, side)
        size = _save(path, side, requests, {text.id: text.prompt for text in golden.texts})
        return GoldenOutcome(True, f"{name}: {one.sentence}; rewritten, {size:,} bytes", one)
    passed = not one.failed and one.verdict in ("tie", "drift")
    return GoldenOutcome(passed, f"{name}: {why if one.failed else one.sentence}{notes}", one, f"{name}: {one.word}")


def _read(text: str, max_new_tokens: int) -> Side:
    """A side of a test."""
    length = Layer("max_new_tokens of the test", {"max_new_tokens": max_new_tokens}, declared="user", typed=True)
    return read_side(text, (length,))


def _setup(early: Resolved, layers: Sequence[Layer]) -> EngineSetup:
    return EngineSetup(early.runtime, tuple(layers), need_tokenizer=True, named=early.names_model)


def _requests(side: LocalSide, prompts: Sequence[str]) -> list[Request]:
    if not prompts:
        raise InputError("there is no prompt to compare the sides on")
    pairs = enumerate(prompts)
    return [Request(str(number), side.resolved, 0, prompt=prompt, place=number + 1) for number, prompt in pairs]


def _save(path: Path, side: LocalSide, requests: Sequence[Request], prompts: Mapping[str, str]) -> int:
    """Write a golden file, all of it or nothing. Returns its bytes."""
    golden, failed = record(side, requests, (), prompts)
    if failed:
        raise InputError(next(iter(failed.values())))
    content = golden_file.content(golden, detokenizer(side.session.loaded.tokenizer).piece)
    path.parent.mkdir(exist_ok=True)
    sink = writers.open_output(path, None, force=True, at_once=True)
    try:
        sink.write(content)
        sink.close()
    finally:
        sink.abandon()
    return len(content)
