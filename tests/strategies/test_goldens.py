"""Searches that transformers 5 no longer has, against the texts of transformers 4: see `scripts/make_goldens.py`."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from genctl import events
from genctl.decode.loop import decode
from genctl.decode.runtime import ModelRuntime
from genctl.decode.types import Lane, Strategy
from genctl.params import Generation
from genctl.strategies.factory import choose
from tests import runtimes
from tests.strategies.checkpoints import ARCHITECTURES, START, made
from tests.strategies.oracle import Found, same

GOLDENS = Path(__file__).parent.parent / "goldens"


def cases(name: str, arch: str) -> list[dict[str, Any]]:
    found = json.loads((GOLDENS / f"{name}.json").read_text())["cases"]
    return [case for case in found if case["arch"] == arch]


@cache
def forward(arch: str) -> ModelRuntime:
    return runtimes.forward(made(arch))


def processors(case: dict[str, Any]) -> tuple[LogitsProcessor, ...]:
    options, found = case["options"], []
    if "repetition_penalty" in options:
        found.append(RepetitionPenaltyLogitsProcessor(options["repetition_penalty"]))
    if "no_repeat_ngram_size" in options:
        found.append(NoRepeatNGramLogitsProcessor(options["no_repeat_ngram_size"]))
    if "min_new_tokens" in options:
        length = 1 if case["arch"] in START else len(case["prompt"])
        found.append(MinNewTokensLengthLogitsProcessor(length, options["min_new_tokens"], case["eos"]))
    return tuple(found)


def lane(case: dict[str, Any], name: str = "0", **fields: Any) -> Lane:
    knobs = Generation(num_return_sequences=len(case["sequences"]), **case["options"])
    strategy: Strategy = choose(knobs, pad_token_id=0)
    prompt = tuple(case["prompt"])
    tokens, source = ((START[case["arch"]],), prompt) if case["arch"] in START else (prompt, None)
    return Lane(
        name,
        tokens,
        strategy,
        case["new"],
        tuple(case["eos"]),
        source,
        processors(case),
        returned=knobs.num_return_sequences,
        **fields,
    )


def written(arch: str, lanes: list[Lane], width: int = 1) -> dict[str, Found]:
    found: dict[str, Found] = {}
    for event in decode(forward(arch), lanes, width=width):
        assert not isinstance(event, events.Failed), event
        if isinstance(event, events.Finished):
            found[event.lane] = [(list(h.tokens), h.score) for h in event.hypotheses]
    return found


def golden(case: dict[str, Any]) -> Found:
    return list(zip(case["sequences"], case.get("scores", [0.0] * len(case["sequences"])), strict=True))


def plain(found: Found, case: dict[str, Any]) -> Found:
    """With the first EOS id in place of every other: transformers 4 wrote that one whichever had ended the row."""
    first = case["eos"][0]
    return [([first if token in case["eos"] else token for token in tokens], score) for tokens, score in found]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_contrastive_search_writes_the_golden_tokens(arch: str) -> None:
    for case in cases("contrastive", arch)[::2]:
        assert [tokens for tokens, _ in written(arch, [lane(case)])["0"]] == case["sequences"]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_contrastive_lanes_do_not_change_in_a_batch_or_without_a_cache(arch: str) -> None:
    chosen = cases("contrastive", arch)
    expected = {str(i): case["sequences"] for i, case in enumerate(chosen)}
    for use_cache in (True, False):
        lanes = [lane(case, str(i), use_cache=use_cache) for i, case in enumerate(chosen)]
        made_here = written(arch, lanes, width=4)
        assert {name: [tokens for tokens, _ in found] for name, found in made_here.items()} == expected


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_diverse_beams_are_golden_with_their_scores(arch: str) -> None:
    chosen = cases("diverse", arch)
    found = written(arch, [lane(case, str(i)) for i, case in enumerate(chosen)], width=8)
    for i, case in enumerate(chosen):
        # length_penalty = -1 multiplies a sum by its 14 tokens, and with it the rounding, which depends on the CPU
        assert same(plain(found[str(i)], case), golden(case), tolerance=5e-4), case
    assert same(written(arch, [lane(chosen[-1])])["0"], found[str(len(chosen) - 1)])


# Cases (by number) in which a text of transformers 4 that keeps its promises is better than ours.
SOONER = "early_stopping = true: three results are there before the better text is"
OTHERS = "the second text is not in the beam: rows that had kept their promise earlier have its place"
BEHIND = {("gpt2", 20): SOONER, ("bart", 20): SOONER, ("gpt2", 7): OTHERS}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_constrained_beams_keep_their_promises_with_better_scores_than_the_golden_ones(arch: str) -> None:
    """Transformers 4 keeps rows with their words only if they are among the best of all, most often at the end.

    In 17 of 90 cases it misses a word that we write. Of the others, 2 are equal, and in 68 our texts are better, one by
    one; the rest are in `BEHIND`.
    """
    chosen = cases("constrained", arch)
    found = written(arch, [lane(case, str(i)) for i, case in enumerate(chosen)], width=8)
    missed = better = 0
    for i, case in enumerate(chosen):
        mine, words = plain(found[str(i)], case), case["options"]["force_words_ids"]
        assert len(mine) == len(case["sequences"])
        assert all(holds(tokens, words) for tokens, _ in mine), case
        kept = [(tokens, score) for tokens, score in golden(case) if holds(tokens, words)]
        behind = any(score < other - 1e-4 for (_, score), (_, other) in zip(mine, kept, strict=False))
        assert behind == ((arch, i) in BEHIND), case
        missed += len(kept) < len(mine)
        better += len(kept) == len(mine) and not behind and not same(mine, kept)
    assert (missed, better) == {"gpt2": (4, 22), "llama": (6, 24), "bart": (7, 22)}[arch]


def holds(tokens: list[int], words: list[Any]) -> bool:
    """Whether each of the words, or one of its alternatives, is in the tokens."""
    text = " ".join(map(str, ["", *tokens, ""]))

    def there(phrase: list[int]) -> bool:
        return " ".join(map(str, ["", *phrase, ""])) in text

    return all(any(map(there, word)) if isinstance(word[0], list) else there(word) for word in words)
