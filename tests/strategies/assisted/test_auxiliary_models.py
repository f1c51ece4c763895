"""Which strategy the knobs for drafting and contrast choose, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest

from genctl.decode.types import Strategy
from genctl.errors import ModelError, UsageError
from genctl.params import Generation
from genctl.strategies.assisted import Assisted
from genctl.strategies.contrast import Amateur, Dola
from genctl.strategies.drafters import ModelDrafter, PromptLookup
from genctl.strategies.factory import AuxiliaryModel, auxiliary_strategy
from genctl.strategies.universal import UniversalDrafter
from tests import runtimes
from tests.decode.driver import PROMPTS, Case
from tests.strategies.assisted.test_drafters import letters
from tests.tiny import tiny, tokenizer

SMALL = runtimes.forward(tiny("llama", seed=5))


def load(name: str) -> AuxiliaryModel:
    return AuxiliaryModel(SMALL, {"small": tokenizer(), "letters": letters(), "silent": None}[name])


def chosen(**knobs: Any) -> Strategy | None:
    return auxiliary_strategy(Generation(**knobs), runtimes.forward(tiny("llama")), tokenizer(), load)


def test_the_knobs_arrive_in_the_strategy() -> None:
    assert chosen() is None
    assert chosen(assistant_model="small", num_assistant_tokens=7) == Assisted(ModelDrafter(SMALL), False, 7)
    drafter = UniversalDrafter(SMALL, letters(), tokenizer(), 4, 6)
    asked = {"assistant_lookbehind": 4, "target_lookbehind": 6, "assistant_confidence_threshold": 0.1}
    assert chosen(assistant_model="letters", **asked) == Assisted(drafter, assistant_confidence_threshold=0.1)
    drawn = {"do_sample": True, "sampler": "counter"}
    lookup = chosen(prompt_lookup_num_tokens=9, max_matching_ngram_size=3, **drawn)
    assert lookup == Assisted(PromptLookup(3), True, 9, True, sampler="counter")
    exits = chosen(assistant_early_exit=1, num_assistant_tokens=3)
    assert isinstance(exits, Assisted)
    assert isinstance(exits.drafter, ModelDrafter)
    assert exits.drafter.depth == 1
    assert chosen(dola_layers=[0, 1], do_sample=True, num_return_sequences=2) == Dola((0, 1), True, 2)
    assert chosen(dola_layers="high") == Dola("high")
    amateur = {"contrastive_alpha": 0.2, "contrastive_beta": 0.5, "amateur_temperature": 0.7}
    assert chosen(amateur_model="small", **amateur) == Amateur(SMALL, 0.2, 0.5, 0.7)


@pytest.mark.parametrize(
    ("knobs", "why"),
    [
        ({"assistant_model": "small", "num_beams": 2}, "assistant_model and num_beams = 2 are two ways to search"),
        ({"prompt_lookup_num_tokens": 3, "dola_layers": "low"}, "prompt_lookup_num_tokens and dola_layers"),
        ({"amateur_model": "small", "penalty_alpha": 0.6}, "amateur_model and penalty_alpha"),
        ({"assistant_early_exit": 1, "force_words": ["a"]}, "assistant_early_exit and force_words"),
        ({"assistant_model": "small", "do_sample": True, "num_return_sequences": 2}, "one sequence at a time"),
        ({"dola_layers": "low", "num_return_sequences": 2}, "would return identical sequences"),
    ],
)
def test_knobs_that_contradict_each_other_are_refused(knobs: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        chosen(**knobs)


def test_checkpoints_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(ModelError, match="has other tokens than the model, so nothing compares"):
        chosen(amateur_model="letters")
    with pytest.raises(ModelError, match="one of them has no tokenizer"):
        chosen(assistant_model="silent")


def test_two_checkpoints_without_tokenizers_are_taken_at_their_word() -> None:
    strategy = auxiliary_strategy(Generation(assistant_model="silent"), SMALL, None, load)
    assert strategy == Assisted(ModelDrafter(SMALL))
    case = Case("llama")
    assert case.ours([case.lane(PROMPTS[0], strategy)]) == case.ours([case.lane(PROMPTS[0])])
