"""Drafts change no byte: text, log-probabilities and alternatives equal those of a run without, greedy or sampled."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest

from genctl import events
from genctl.decode.loop import decode
from genctl.decode.processors.build import ProcessorContext, build
from genctl.decode.stopping import Stop, Written
from genctl.decode.types import Lane
from genctl.params import Generation
from genctl.strategies.assisted import Assisted
from genctl.strategies.drafters import Drafter, ModelDrafter, PromptLookup, SuffixDrafter, early_exit
from genctl.strategies.factory import choose
from tests import runtimes
from tests.decode.driver import Case
from tests.strategies.assisted.assistants import alike, drafts

ARCHS = ("llama", "gpt2", "mistral", "qwen2", "gemma2", "bloom")
EACH = 50  # configurations of a test

# Each setting with its possible values, including the neutral one.
SAMPLING: dict[str, tuple[Any, ...]] = {
    "temperature": (0.2, 0.7, 1.0, 1.7),
    "top_k": (0, 0, 5, 40),
    "top_p": (1.0, 1.0, 0.8),
    "min_p": (None, None, 0.05),
    "typical_p": (1.0, 1.0, 0.7),
    "xtc_probability": (0.0, 0.0, 0.5),
    "mirostat_tau": (None, None, None, 3.0),
    "dynatemp_range": (0.0, 0.0, 0.3),
    "sampler": ("multinomial", "multinomial", "inverse-cdf", "counter"),
}
OTHERS: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (1.0, 1.0, 1.2, 0.6),
    "presence_penalty": (0.0, 0.0, -0.8),
    "no_repeat_ngram_size": (0, 0, 3),
    "min_new_tokens": (None, None, 7),
    "sequence_bias": (None, None, [([40, 41], 4.0), ([7], 2.0)]),
}


@cache
def case(arch: str) -> Case:
    return Case(arch)


@cache
def assistant(arch: str) -> ModelDrafter:
    return ModelDrafter(runtimes.forward(alike(arch)))


def drafter_of(arch: str, dice: random.Random) -> Drafter:
    kind = dice.choice(("lookup", "suffix", "assistant", "early exit"))
    if kind == "suffix":
        drafter = SuffixDrafter()
        drafter.keep([dice.randrange(5, 300) for _ in range(20)])
        return drafter
    if kind == "lookup":
        return PromptLookup(dice.choice((1, 2, 3)))
    return assistant(arch) if kind == "assistant" else early_exit(case(arch).forward, 1)


def sum_of_two(written: Written) -> Stop | None:
    """A stopping criterion that reads the text so far."""
    return Stop("stop", "enough") if written.count > 5 and sum(written.tail(2)) % 11 == 0 else None


def lanes(dice: random.Random) -> tuple[Case, list[Lane]]:
    """Two or three prompts of one configuration, each without and with drafts."""
    arch = dice.choice(ARCHS)
    one = case(arch)
    knobs: dict[str, Any] = {name: dice.choice(values) for name, values in OTHERS.items()}
    if dice.random() < 0.75:
        knobs |= {"do_sample": True, **{name: dice.choice(values) for name, values in SAMPLING.items()}}
    if knobs.get("mirostat_tau"):
        knobs["top_k"] = 0
    generation = Generation(**knobs)
    strategy = Assisted(
        drafter_of(arch, dice),
        generation.do_sample,
        dice.choice((None, 1, 2, 5)),
        dice.choice((None, True, False)),
        dice.choice((0.0, 0.4)),
        generation.sampler,
        unasked=dice.random() < 0.3,
    )
    explained = {"scores": True, "top": 2} if dice.random() < 0.3 else {}
    criteria = (sum_of_two,) if dice.random() < 0.3 else ()
    use_cache = dice.random() < 0.9
    made = []
    for number in range(dice.choice((2, 3))):
        unit = [dice.randrange(5, 300) for _ in range(dice.randint(1, 4))]
        prompt = (*(unit * dice.randint(1, 4)), *dice.sample(unit, 1))  # repeats itself, so that lookup finds something
        new = dice.randint(1, 24)
        material = ProcessorContext(
            generation, len(prompt), len(prompt) + new, one.forward.vocab_size, eos=one.eos, seed=number
        )
        for name, way in ((f"{number}", choose(generation)), (f"{number} drafted", strategy)):
            fields = {"seed": dice.getrandbits(6) if name == f"{number}" else made[-1].seed}
            made.append(
                one.lane(
                    prompt, way, name, processors=build(material), max_new_tokens=new, criteria=criteria,
                    use_cache=use_cache, **explained, **fields,
                )
            )  # fmt: skip
    return one, made


def told(found: list[events.Event]) -> dict[str, tuple[Any, Any]]:
    """For each lane, the tokens with all their reported numbers, and the result."""
    tokens: dict[str, list[events.Token]] = {}
    results: dict[str, Any] = {}
    for event in found:
        if isinstance(event, events.Stepped):
            (row,) = event.children
            tokens.setdefault(event.lane, []).extend(row.written)
        elif isinstance(event, events.Finished):
            results[event.lane] = event.hypotheses
        assert not isinstance(event, events.Failed), event
    return {lane: (tokens[lane], results[lane]) for lane in results}


@pytest.mark.parametrize("part", range(200))
def test_drafts_change_no_byte(part: int) -> None:
    accepted = 0
    for number in range(EACH * part, EACH * (part + 1)):
        dice = random.Random(number)
        one, given = lanes(dice)
        found = list(decode(one.forward, given, width=dice.choice((1, 2, 6))))
        by_lane = told(found)
        for lane in given[::2]:
            assert by_lane[f"{lane.name} drafted"] == by_lane[lane.name], f"configuration {number}, lane {lane.name}"
        accepted += drafts(found)[1]
    assert accepted > EACH
