"""Grammars in the loop: greedy, sampling, beams; causal and encoder-decoder; several lanes at once."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from torch import Tensor

from genctl import events
from genctl.decode.loop import decode
from genctl.decode.processors.build import NamedProcessor, ProcessorContext
from genctl.decode.processors.grammar import Grammar, constraint
from genctl.decode.processors.grammar_source import read
from genctl.decode.processors.token_bytes import spelling
from genctl.decode.types import Lane, Strategy
from genctl.params import Generation
from genctl.strategies.beam import Beam
from genctl.strategies.sample import Sample
from tests.decode.driver import PROMPTS, Case
from tests.tiny import EOS, tokenizer

LANGUAGE = ["the cat", "the dog", "a cat", "a dog"]
PATTERN = "(the|a) (cat|dog)"


def lane(
    case: Case, strategy: Strategy, name: str = "0", pattern: str = PATTERN, prompt: int = 0, **fields: object
) -> Lane:
    source = read(Generation(regex=pattern))
    assert source is not None
    made = case.lane(PROMPTS[prompt], strategy, name)
    grammar = Grammar(source, spelling(tokenizer(), 300, "regex"), len(made.tokens), (EOS,))
    return case.lane(PROMPTS[prompt], strategy, name, processors=(NamedProcessor("regex", grammar),), **fields)


def texts(found: list[list[int]]) -> list[str]:
    assert all(row[-1] == EOS for row in found)
    return [tokenizer().decode(row, skip_special_tokens=True) for row in found]


@pytest.mark.parametrize("arch", ["llama", "gpt2", "t5", "bart"])
@pytest.mark.parametrize("strategy", [Sample(), Sample(True, 3), Beam(3, n=3), Beam(3, do_sample=True)])
def test_every_strategy_stays_in_the_grammar(arch: str, strategy: Strategy) -> None:
    case = Case(arch)
    assert set(texts(case.ours([lane(case, strategy)])["0"])) <= set(LANGUAGE)


def test_sampling_reaches_every_text() -> None:
    case = Case("llama")
    lanes = [lane(case, Sample(True, 16), str(seed), "a|b|ab", seed=seed) for seed in range(12)]
    found = {text for rows in case.ours(lanes, width=2).values() for text in texts(rows)}
    assert found == {"a", "b", "ab"}


def test_a_beam_as_wide_as_the_language_finds_the_most_probable_text() -> None:
    case = Case("llama")
    ids = [tokenizer().convert_tokens_to_ids(char) for char in "cdfg"]  # letters whose strings have one token each
    pattern = "[cdfg]{1,2}"
    rows = [[*row, EOS] for n in (1, 2) for row in itertools.product(ids, repeat=n)]
    beam = Beam(20, length_penalty=0.0, early_stopping="never", n=20)
    [finished] = [
        event
        for event in case.stream([lane(case, beam, pattern=pattern, returned=20)])
        if isinstance(event, events.Finished)
    ]
    assert sorted(list(one.tokens) for one in finished.hypotheses) == sorted(rows)
    scored = []
    for row in rows:
        forced = next(event for event in _forced(case, row) if isinstance(event, events.Finished))
        scored.append((forced.hypotheses[0].logprob, row))
    assert list(finished.hypotheses[0].tokens) == max(scored)[1]


def _forced(case: Case, row: list[int]) -> list[events.Event]:
    def only(history: Tensor, scores: Tensor) -> Tensor:
        made = torch.full_like(scores, -torch.inf)
        made[:, row[history.shape[1] - len(PROMPTS[0])]] = 0.0
        return made

    return case.stream([case.lane(PROMPTS[0], Sample(), processors=(only,))])


def test_lanes_do_not_see_each_other() -> None:
    case = Case("llama")
    kinds: list[tuple[Strategy, str]] = [(Sample(), PATTERN), (Sample(True, 2), "[0-9]{2,4}"), (Beam(2), "x{1,4}y")]
    made = [
        lane(case, strategy, f"{n}-{prompt}", pattern, prompt, seed=prompt)
        for n, (strategy, pattern) in enumerate(kinds)
        for prompt in range(3)
    ]
    together = case.ours(made, width=4)
    for one in made:
        assert case.ours([one])[one.name] == together[one.name]
        pattern = kinds[int(one.name[0])][1]
        assert all(re.fullmatch(pattern, text) for text in texts(together[one.name]))


def test_a_processor_that_bars_what_the_grammar_needs_fails_with_both_names() -> None:
    case = Case("llama")

    def no_letters(history: Tensor, scores: Tensor) -> Tensor:
        return scores.index_fill(1, torch.arange(35, 300), -torch.inf)

    good = lane(case, Sample())
    bad = Lane(
        "0",
        good.tokens,
        good.strategy,
        20,
        good.eos,
        processors=(*good.processors, NamedProcessor("letters", no_letters)),
    )
    [failed] = [event for event in decode(case.forward, [bad]) if isinstance(event, events.Failed)]
    assert "regex" in failed.message
    assert "letters" in failed.message


def test_a_forced_language_token_comes_before_the_text() -> None:
    case = Case("bart")
    generation = Generation(json_schema={"enum": ["a"]}, forced_bos_token_id=1)
    made = constraint(ProcessorContext(generation, 1, 20, 300, (EOS,), tokenizer=tokenizer()), None, "json_schema")
    assert made is not None

    def first(history: Tensor, scores: Tensor) -> Tensor:
        if history.shape[1] == 1:
            scores = torch.full_like(scores, -torch.inf)
            scores[:, 1] = 0.0
        return scores

    found = case.ours([case.lane(PROMPTS[0], processors=(first, made))])["0"]
    assert found[0][0] == 1
    assert texts(found) == ['"a"']
