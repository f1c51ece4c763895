"""Parity for programs and tests: two sides, or one side and a golden file. Settings files are not read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from genctl.commands.parity import golden_file
from genctl.commands.parity.sides import Side, read_side
from genctl.config.layers import Layer, Resolved
from genctl.errors import InputError, UsageError
from genctl.io import writers

if TYPE_CHECKING:
    from genctl.commands.parity.loading import LoadedSides
    from genctl.engines.requests import Request
    from genctl.parity.recorded import Golden
    from genctl.parity.sides import LocalSide
    from genctl.parity.values import Parity

NEW_TOKENS = 32  # of each prompt


@dataclass(frozen=True)
class GoldenOutcome:
    """What came of a golden file: true where the side agrees with it, or was recorded."""

    passed: bool
    words: str
    parity: Parity | None = None  # None: it was recorded

    def __bool__(self) -> bool:
        return self.passed

    def __repr__(self) -> str:
        return f"<{self.words}>"


def compare(reference: str, other: str, prompts: Sequence[str], max_new_tokens: int = NEW_TOKENS) -> Parity:
    """Compare two sides on greedy texts of prompts. Raises GenctlError, also for a prompt that a side cannot read."""
    from genctl.commands.parity.vocabularies import check_same
    from genctl.parity.measure import measure

    loaded = _loaded()
    mine, theirs = (_load(loaded, text, prompts, max_new_tokens) for text in (reference, other))
    check_same(
        mine.session.loaded, theirs.session.loaded, [(str(number), text) for number, text in enumerate(prompts, 1)]
    )
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
    name = path.stem
    if not path.exists():
        if not update:
            raise InputError(f"golden {name}: there is no {path}", hint="pytest --genctl-update records it")
        here = _load(_loaded(), side, prompts, max_new_tokens)
        size = _save(path, here, _requests(here, prompts), {str(at): prompt for at, prompt in enumerate(prompts)})
        return GoldenOutcome(True, f"golden {name}: recorded, {size:,} bytes")
    golden = golden_file.read(str(path))
    if [text.prompt for text in golden.texts] != list(prompts) or golden.new_tokens != max_new_tokens:
        raise InputError(
            f"golden {name}: {path} has other prompts, or another max_new_tokens",
            hint="remove the file, and pytest --genctl-update records it again",
        )
    return _compared(path, golden, _load(_loaded(), side, prompts, max_new_tokens), update=update)


def _compared(path: Path, golden: Golden, side: LocalSide, *, update: bool) -> GoldenOutcome:
    from genctl.commands.parity import goldens
    from genctl.parity.golden import compare as compare_golden

    goldens.check_same(golden, side)
    one = compare_golden(golden, side)
    words = f"golden {path.stem}: {one.sentence}"
    why = goldens.not_tied(one)
    if not update:
        if one.failed:
            return GoldenOutcome(False, f"golden {path.stem}: {why}", one)
        return GoldenOutcome(one.verdict in ("tie", "drift"), words, one)
    if why:
        return GoldenOutcome(False, f"golden {path.stem} stays as it is: {why}", one)
    requests, _ = goldens.again(golden, side)
    size = _save(path, side, requests, {text.id: text.prompt for text in golden.texts})
    return GoldenOutcome(True, f"{words}; rewritten, {size:,} bytes", one)


def _loaded() -> LoadedSides:
    from genctl.commands.parity.loading import LoadedSides
    from genctl.engines.protocol import EngineSetup

    def setup(side: Side, early: Resolved) -> EngineSetup:
        return EngineSetup(early.runtime, side.layers, need_tokenizer=True)

    return LoadedSides(setup)


def _load(loaded: LoadedSides, text: str, prompts: Sequence[str], max_new_tokens: int) -> LocalSide:
    length = Layer("max_new_tokens of the test", {"max_new_tokens": max_new_tokens}, said="user", typed=True)
    side = read_side(text, (length,))
    early = side.early()
    if early.runtime.backend is not None:
        raise UsageError(f"{side.place}: a gate needs a checkpoint here")
    return loaded.load(side, early, [str(number) for number in range(len(prompts))])


def _requests(side: LocalSide, prompts: Sequence[str]) -> list[Request]:
    from genctl.engines.requests import Request

    if not prompts:
        raise InputError("there is no prompt to compare the sides on")
    pairs = enumerate(prompts)
    return [Request(str(number), side.resolved, 0, prompt=prompt, place=number + 1) for number, prompt in pairs]


def _save(path: Path, side: LocalSide, requests: Sequence[Request], prompts: Mapping[str, str]) -> int:
    """Write a golden file, all of it or nothing. Returns its bytes."""
    from genctl.commands.parity.goldens import recorded
    from genctl.models.text import detokenizer

    golden, failed = recorded(side, requests, (), prompts)
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
