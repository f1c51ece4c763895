"""Unusual models: what they cannot do is detected before it does harm, and reported."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import transformers

from genctl import events
from genctl.decode.loop import decode
from genctl.decode.types import Lane
from genctl.engines.score_passes import Passes, Piece
from genctl.errors import ModelError
from genctl.strategies.beam import Beam
from genctl.strategies.contrast import Contrastive
from genctl.strategies.sample import Sample
from genctl.transformers.runtime import TransformersRuntime
from tests.decode.driver import PROMPTS
from tests.tiny import EOS, tiny
from tests.versions import CACHE

NEW = 10


class OddConfig(transformers.GPT2Config):
    model_type = "odd"  # an architecture that nobody has listed


class Odd(transformers.GPT2LMHeadModel):
    """GPT-2, unchanged, under another name."""

    config_class = OddConfig


class Crosstalk(Odd):
    """The logits of each row depend on the others."""

    def forward(self, *args: Any, **inputs: Any) -> Any:
        output = super().forward(*args, **inputs)
        output.logits = output.logits + 2 * (output.logits.mean(0, keepdim=True) - output.logits)
        return output


class Forgetful(Odd):
    """The past is kept in the module, and a new prompt overwrites it."""

    def forward(self, *args: Any, **inputs: Any) -> Any:
        cache = inputs.get(CACHE)
        if inputs["input_ids"].shape[1] == 1 and cache is not None:
            cache.layers = self.kept.layers
        output = super().forward(*args, **inputs)
        if cache is not None:
            self.kept = cache
        return output


class Unmasked(Odd):
    """Padding is read as if it were text."""

    def forward(self, *args: Any, attention_mask: Any = None, position_ids: Any = None, **inputs: Any) -> Any:
        return super().forward(*args, **inputs)


class Broken(Odd):
    """Fails once a text is longer than eight tokens."""

    def forward(self, *args: Any, position_ids: Any = None, **inputs: Any) -> Any:
        if position_ids.max() >= 8:
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied\n(3x4 and 5x6)")
        return super().forward(*args, position_ids=position_ids, **inputs)


def made(kind: type[Odd]) -> Odd:
    """A tiny model of this kind with the weights of the tiny GPT-2."""
    original = tiny("gpt2")
    model = kind(OddConfig(**{k: v for k, v in original.config.to_dict().items() if k != "model_type"}))
    model.load_state_dict(original.state_dict())
    return model.eval()


def lane(place: int, strategy: Any = None, **fields: Any) -> Lane:
    strategy = strategy or Sample()
    fields = {"max_new_tokens": NEW, "eos": (EOS,), "returned": getattr(strategy, "n", 1), **fields}
    return Lane(str(place), tuple(PROMPTS[place]), strategy, **fields)


def run(
    forward: TransformersRuntime, lanes: list[Lane], width: int = 1
) -> dict[tuple[str, int, tuple[int, ...]], float]:
    """(lane, rank, tokens) -> log-probability, of every hypothesis."""
    return {
        (event.lane, rank, one.tokens): one.logprob
        for event in decode(forward, lanes, width=width)
        if isinstance(event, events.Finished)
        for rank, one in enumerate(event.hypotheses)
    }


def plain(lanes: list[Lane], width: int = 1) -> Any:
    """The same for the tiny GPT-2, to compare up to rounding."""
    return pytest.approx(run(TransformersRuntime(tiny("gpt2")), lanes, width), abs=1e-4)


def test_a_model_that_only_has_another_name_loses_nothing() -> None:
    forward = TransformersRuntime(made(Odd))
    lanes = [lane(place, Beam(3, n=3)) for place in range(3)]
    assert run(forward, lanes, 3) == plain(lanes, 3)
    assert forward.abilities.supports_cache
    assert forward.abilities.together
    assert forward.abilities.pads
    assert forward.findings == []


def test_what_was_measured_does_not_count_as_passes_and_keeps_no_model_in_memory() -> None:
    forward = TransformersRuntime(made(Odd))
    weights = weakref.ref(forward.model.lm_head.weight)
    gc.disable()  # a model must not wait for the collector: its weights are gigabytes
    try:
        assert forward.abilities.pads
        assert forward.forwards == 0
        del forward
        assert weights() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("strategy", [Sample(), Beam(3, n=3), Sample(True, 3), Contrastive(4, 0.6)])
def test_rows_that_change_each_other_are_read_one_by_one(strategy: Any) -> None:
    forward = TransformersRuntime(made(Crosstalk))
    lanes = [lane(place, strategy) for place in range(3)]
    # the mean of one row is the row: alone it computes what GPT-2 does
    assert run(forward, lanes, 3) == plain(lanes)
    assert any("affect each other" in finding for finding in forward.findings)


def test_a_past_that_lives_in_the_module_is_not_relied_on() -> None:
    forward = TransformersRuntime(made(Forgetful))
    lanes = [lane(place) for place in range(3)]
    assert run(forward, lanes, 3) == plain(lanes)
    assert not forward.abilities.supports_cache
    assert any("without one" in finding for finding in forward.findings)


def test_prompts_of_different_lengths_share_no_pass_where_padding_is_read() -> None:
    forward = TransformersRuntime(made(Unmasked))
    lanes = [lane(place, Beam(2, n=2)) for place in range(3)]
    assert run(forward, lanes, 3) == plain(lanes)
    assert not forward.abilities.pads
    assert forward.abilities.together


def test_texts_are_scored_apart_where_rows_change_each_other() -> None:
    pieces = [Piece(tuple(prompt), 1) for prompt in PROMPTS]
    passes = Passes(TransformersRuntime(made(Crosstalk)), batch_size=3)
    batches = list(passes.batches(pieces))
    assert [len(batch) for batch in batches] == [1, 1, 1]
    expected = Passes(TransformersRuntime(tiny("gpt2")), batch_size=1)
    for (place,) in batches:
        found = [token.logprob for token in passes.read([pieces[place]])[0]]
        assert found == pytest.approx([token.logprob for token in expected.read([pieces[place]])[0]], abs=1e-4)


def test_what_fails_in_a_models_own_code_is_told_in_a_line_and_ends_only_its_row() -> None:
    forward = TransformersRuntime(made(Broken))
    found = list(decode(forward, [lane(0), lane(1), lane(0, max_new_tokens=2)], width=1))
    failed = [event for event in found if isinstance(event, events.Failed)]
    assert [event.lane for event in failed] == ["0", "1"]
    assert all(event.code == ModelError.code and "\n" not in event.message for event in failed)
    assert "Broken failed in its own code: RuntimeError: mat1 and mat2" in failed[0].message
    assert sum(isinstance(event, events.Finished) for event in found) == 1
