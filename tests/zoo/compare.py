"""One checkpoint of the zoo, written by genctl and by transformers' `generate`: case by case, is it the same?

The oracle reads one prompt at a time, from the checkpoint as transformers loads it. Where its own cache changes its
text, `generate(use_cache=False)` has the word: it reads everything again at each step.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers

import genctl
from genctl import events
from genctl.errors import GenctlError
from genctl.io.rows import row_seed
from tests.tiny import EOS
from tests.versions import as_loaded
from tests.zoo import recipes

PROMPTS: tuple[tuple[int, ...], ...] = tuple(
    tuple(torch.randint(3, 290, (length,), generator=torch.Generator().manual_seed(length)).tolist())
    for length in (5, 14, 9)
)
NEW = 16
SEED = 7
TOLERANCE = 2e-4  # of the score of a sequence
_TIED = 1e-5  # scores that close may change places
# name -> why what it draws cannot be compared
NOT_DRAWN = {"causal/reformer": "its forward seeds the generator that generate() draws from"}

# case -> settings, and whether the EOS ids are ones that the texts meet
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    "beams": {"num_beams": 3, "num_return_sequences": 3},
    "sampling": {"do_sample": True, "top_k": 50, "num_return_sequences": 3},
    "beam-sample": {"do_sample": True, "top_k": 50, "num_beams": 3, "num_return_sequences": 2},
}
Rows = list[tuple[list[int], float]]  # new tokens, EOS included, and the score of beams


class Refused(Exception):
    """genctl says that it cannot do this; the sentence."""


@dataclass
class Verdict:
    """What a case came to: "equal", "refused", "different", "crash" or "no oracle"; and what there is to say of it."""

    word: str
    note: str = ""

    def __str__(self) -> str:
        return self.word if not self.note else f"{self.word}: {self.note}"


@dataclass
class Report:
    """All that was found of one checkpoint."""

    name: str
    cases: dict[str, Verdict] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def word(self) -> str:
        """The worst of its cases."""
        found = {verdict.word for verdict in self.cases.values()}
        return next(word for word in ("crash", "different", "refused", "no oracle", "equal") if word in found)


class Checkpoint:
    """A checkpoint in a folder, loaded by both."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.notes: list[str] = []

    @cached_property
    def ours(self) -> Any:
        try:
            with quiet():
                return genctl.load(str(self.folder), device="cpu")
        except GenctlError as error:
            raise Refused(error.message.replace(str(self.folder), "FOLDER")) from error

    @cached_property
    def theirs(self) -> Any:
        with quiet():
            return as_loaded(recipes.auto_class(self.name).from_pretrained(self.folder)).eval()

    @cached_property
    def eos(self) -> list[int]:
        """EOS ids that the beams of this checkpoint meet: its own, and a token of two greedy texts."""
        greedy = [self.expected(prompt, "greedy", 0)[0][0] for prompt in PROMPTS[:2]]
        return sorted({EOS, *(text[len(text) // 2] for text in greedy)})

    def settings(self, case: str) -> dict[str, Any]:
        """What both are given."""
        found = {"max_new_tokens": NEW, "do_sample": False, **CASES[case]}
        if case.startswith("beam"):
            found["eos_token_id"] = self.eos
        return found

    def written(self, case: str, places: Sequence[int], width: int, **further: Any) -> list[Rows]:
        """What genctl writes after these prompts, `width` at once."""
        seed = SEED if len(places) > 1 else row_seed(SEED, str(places[0]), places[0])
        settings = {**self.settings(case), "batch_size": width, "seed": seed, **further}
        found: dict[str, Rows] = {}
        prompts = [list(PROMPTS[place]) for place in places]
        try:
            with quiet():
                for event in self.ours.stream(prompts, **settings):
                    if isinstance(event, events.Failed):
                        raise Refused(event.message)
                    if isinstance(event, events.Finished):
                        found[event.lane] = [(list(one.tokens), one.score) for one in event.hypotheses]
        except GenctlError as error:
            raise Refused(error.message) from error
        return [found[str(place)] for place in range(len(places))]

    def expected(self, prompt: Sequence[int], case: str, place: int, **further: Any) -> Rows:
        """What `generate` writes after one prompt."""
        settings = self.settings(case)
        ids = torch.tensor([list(prompt)])
        torch.manual_seed(row_seed(SEED, str(place), place))
        with quiet():
            made = self.theirs.generate(
                ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, output_scores=True, **settings,
                **further,
            )  # fmt: skip
        skipped = 1 if self.theirs.config.is_encoder_decoder else len(prompt)
        eos = settings.get("eos_token_id", [EOS])
        texts = [_cut(row[skipped:], eos) for row in made.sequences.tolist()]
        scores = made.sequences_scores.tolist() if case.startswith("beam") else [0.0] * len(texts)
        return list(zip(texts, scores, strict=True))


def compare(name: str, folder: Path, cases: Sequence[str] = tuple(CASES)) -> Report:
    """Make the checkpoint `name` in `folder`, and run the cases: each prompt alone, then all together."""
    report = Report(name)
    checkpoint = Checkpoint(name, recipes.make(name, folder))
    for case in cases:
        if CASES[case].get("do_sample") and name in NOT_DRAWN:
            continue
        report.cases.update(_case(checkpoint, case))
        if all(verdict.word == "refused" for verdict in report.cases.values()) and _unloadable(checkpoint):
            break
    report.notes = checkpoint.notes
    return report


def _unloadable(checkpoint: Checkpoint) -> bool:
    return "ours" not in vars(checkpoint)


def _case(checkpoint: Checkpoint, case: str) -> Iterator[tuple[str, Verdict]]:
    oracle = _Oracle(checkpoint, case)
    try:
        checkpoint.ours  # noqa: B018 — loaded here, so that errors are those of loading
    except Refused as refusal:
        yield case, Verdict("refused", f"{refusal} ({oracle.works})")
        return
    except Exception as error:
        yield case, Verdict("crash", f"while loading: {_brief(error)} ({oracle.works})")
        return
    ways: dict[str, Callable[[], list[Rows]]] = {
        case: lambda: [checkpoint.written(case, [place], 1)[0] for place in range(len(PROMPTS))],
        f"{case} together": lambda: checkpoint.written(case, range(len(PROMPTS)), len(PROMPTS)),
    }
    for way, write in ways.items():
        yield way, _verdict(write, oracle)


class _Oracle:
    """What `generate` writes in one case, called once; without its cache only where that matters."""

    def __init__(self, checkpoint: Checkpoint, case: str) -> None:
        self._ask = lambda **further: [
            checkpoint.expected(prompt, case, place, **further) for place, prompt in enumerate(PROMPTS)
        ]
        self.failures: list[str] = []

    @cached_property
    def usual(self) -> list[Rows] | None:
        return self._asked()

    @cached_property
    def uncached(self) -> list[Rows] | None:
        return self._asked(use_cache=False)

    @property
    def works(self) -> str:
        if self.usual is not None:
            return "generate works"
        return "generate works without its cache" if self.uncached is not None else "generate fails too"

    def _asked(self, **further: Any) -> list[Rows] | None:
        try:
            return self._ask(**further)
        except Exception as error:
            self.failures.append(f"generate({', '.join(f'{k}={v}' for k, v in further.items())}): {_brief(error)}")
            return None


def _verdict(write: Callable[[], list[Rows]], oracle: _Oracle) -> Verdict:
    try:
        found = write()
    except Refused as refusal:
        return Verdict("refused", f"{refusal} ({oracle.works})")
    except Exception as error:
        return Verdict("crash", f"{_brief(error)} ({oracle.works})")
    usual = "it fails" if oracle.usual is None else _difference(found, oracle.usual)
    if not usual:
        return Verdict("equal")
    if oracle.uncached is None:
        return Verdict("no oracle" if oracle.usual is None else "different", "; ".join([usual, *oracle.failures]))
    if not _difference(found, oracle.uncached):
        return Verdict("equal", f"to generate without its cache; with it: {usual}")
    if oracle.usual is None:
        usual = f"without the oracle's cache, {_difference(found, oracle.uncached)}"
    elif not any(_difference([a], [b]) for a, b in zip(oracle.usual, oracle.uncached, strict=True)):
        return Verdict("different", usual)
    return Verdict("different", f"{usual} (and the oracle with and without its cache disagree)")


def _difference(found: list[Rows], expected: list[Rows]) -> str:
    """Where two sets of rows differ; "" if they do not."""
    for place, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        if len(ours) != len(theirs):
            return f"prompt {place}: {len(ours)} sequences for {len(theirs)}"
        for rank, ((text, score), (wanted, their_score)) in enumerate(zip(ours, theirs, strict=True)):
            if abs(score - their_score) > TOLERANCE and their_score:
                return f"prompt {place}, sequence {rank}: score {score:.5f} for {their_score:.5f}"
            if text != wanted:
                if their_score and any(text == other and abs(s - score) < _TIED for other, s in theirs):
                    continue  # of equal scores either may be first
                same = next((n for n, (a, b) in enumerate(zip(text, wanted, strict=False)) if a != b), None)
                at = min(len(text), len(wanted)) if same is None else same
                return f"prompt {place}, sequence {rank}: token {at} is {text[at : at + 1]} for {wanted[at : at + 1]}"
    return ""


def _cut(tokens: list[int], eos: Sequence[int]) -> list[int]:
    for place, token in enumerate(tokens):
        if token in eos:
            return tokens[: place + 1]
    return tokens


def _brief(error: BaseException) -> str:
    line = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {line[:200]}"


@contextmanager
def quiet() -> Iterator[None]:
    """Without what transformers has to say about settings that it passes over, in logs and on stdout."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(level)
