"""Texts that grow beyond the context that their rotary frequencies were made for."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import transformers

from genctl.decode.runtime import Pass
from genctl.decode.types import Draft, Lane
from genctl.engines.score_passes import Passes, Piece
from genctl.strategies.assisted import Assisted
from genctl.strategies.beam import Beam
from genctl.strategies.sample import Sample
from genctl.transformers.runtime import TransformersRuntime
from tests import runtimes
from tests.decode.driver import written
from tests.tiny import EOS, PAD, sharpen
from tests.versions import OLDER

NAMES = ("phi3", "phi3 with a window", "llama", "longrope")
BOUND = 16  # tokens
NEW = 20
PROMPTS = tuple(
    tuple(torch.randint(3, 300, (length,), generator=torch.Generator().manual_seed(length)).tolist())
    for length in (5, 12, 24)  # the last one is beyond the bound from the start
)
_SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0, 3.0, 2.0, 8.0],
    "original_max_position_embeddings": BOUND,
}


@cache
def model(name: str) -> Any:
    torch.manual_seed(0)
    made: Any
    if name.startswith("phi3"):
        config = transformers.Phi3Config(
            **_SIZES,
            max_position_embeddings=256,
            original_max_position_embeddings=BOUND,
            rope_parameters=_LONG,
            sliding_window=5 if name == "phi3 with a window" else None,
        )
        made = transformers.Phi3ForCausalLM(config)
    elif name == "longrope":
        config = transformers.LlamaConfig(**_SIZES, max_position_embeddings=64, rope_parameters=_LONG)
        made = transformers.LlamaForCausalLM(config)
    else:
        dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
        config = transformers.LlamaConfig(**_SIZES, max_position_embeddings=BOUND, rope_parameters=dynamic)
        made = transformers.LlamaForCausalLM(config)
    sharpen(made)
    return made.eval()


@pytest.fixture(params=[TransformersRuntime, runtimes.native], ids=["transformers", "native"])
def runtime(request: pytest.FixtureRequest) -> Any:
    """The kind of runtime: a transformers model -> the model as the loop sees it."""
    return request.param


def lane(place: int, strategy: Any = None, **fields: Any) -> Lane:
    strategy = strategy or Sample()
    fields = {"max_new_tokens": NEW, "eos": (EOS,), "returned": getattr(strategy, "n", 1), **fields}
    return Lane(str(place), PROMPTS[place], strategy, **fields)


def generated(name: str, place: int, **options: Any) -> list[list[int]]:
    """Texts by a fresh model: transformers keeps the frequencies of its last pass. Clears the cache of `model`."""
    rows = _generated(name, place, **options)
    model.cache_clear()
    return rows


@cache
def _generated(name: str, place: int, **options: Any) -> list[list[int]]:
    model.cache_clear()
    ids = torch.tensor([PROMPTS[place]])
    # re-reading everything in each step gives the same; with a cache, older versions re-read a phi3 wrongly
    options = {
        "do_sample": False,
        "max_new_tokens": NEW,
        "use_cache": not (OLDER and name.startswith("phi3")),
        **options,
    }
    rows = model(name).generate(ids, attention_mask=torch.ones_like(ids), **options)[:, ids.shape[1] :].tolist()
    return [row[: row.index(EOS) + 1] if EOS in row else row for row in rows]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", ["dynamic", "static", "quantized"])
def test_a_text_that_outgrows_its_bound_is_what_generate_writes(runtime: Any, name: str, form: str) -> None:
    for place in range(3):
        expected = generated(name, place)
        found = written(runtime(model(name)), [lane(place, cache=form)])[str(place)]
        assert len(found[0]) == len(expected[0])
        if form != "quantized":  # which is lossy
            assert found == expected


@pytest.mark.parametrize("name", NAMES)
def test_beams_that_outgrow_the_bound_are_those_of_generate(runtime: Any, name: str) -> None:
    for place in range(3):
        expected = generated(name, place, num_beams=3, num_return_sequences=3)
        assert written(runtime(model(name)), [lane(place, Beam(3, n=3))])[str(place)] == expected


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", [2, 3])
def test_neighbours_of_other_lengths_change_nothing(runtime: Any, name: str, width: int) -> None:
    expected = {str(place): generated(name, place) for place in range(3)}
    lanes = [lane(place) for place in range(3)]
    assert written(runtime(model(name)), lanes, width) == expected
    assert written(runtime(model(name)), lanes[::-1], width) == expected


class Guess:
    """Drafts two tokens that greedy writes, and one that it does not."""

    kind = "guess"

    def __init__(self, text: list[int]) -> None:
        self.text = text

    def begin(self, context: Any, do_sample: bool, confidence: float) -> Any:
        def draft(row: torch.Tensor, count: int) -> Draft:
            right = self.text[len(row) : len(row) + 2]
            return Draft([*right, 3][:count])

        return draft


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("place", range(3))
def test_drafts_across_the_bound_write_what_greedy_writes(runtime: Any, name: str, place: int) -> None:
    expected = generated(name, place)
    drafting = Assisted(Guess([*PROMPTS[place], *expected[0]]))
    assert written(runtime(model(name)), [lane(place, drafting)]) == {str(place): expected}


@pytest.mark.parametrize("name", NAMES)
def test_texts_of_other_lengths_do_not_change_a_score(runtime: Any, name: str) -> None:
    pieces = [Piece((*prompt, *prompt[:8]), 1) for prompt in PROMPTS]
    passes = Passes(runtime(model(name)), batch_size=3)
    found: dict[int, list[float]] = {}
    for batch in passes.batches(pieces):
        for place, tokens in zip(batch, passes.read([pieces[place] for place in batch]), strict=True):
            found[place] = [token.logprob for token in tokens]
    for place, piece in enumerate(pieces):
        model.cache_clear()
        ids = torch.tensor([piece.ids])
        with torch.no_grad():
            logits = model(name)(ids[:, :-1]).logits.log_softmax(-1)
        expected = logits[0].gather(1, ids[0, 1:, None])[:, 0].tolist()
        assert found[place] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("name", ["phi3", "llama"])
@pytest.mark.parametrize(("before", "after"), [(5, 12), (12, 24), (24, 12), (20, 24)])
def test_a_prompt_that_is_taken_up_is_read_as_a_whole_one(runtime: Any, name: str, before: int, after: int) -> None:
    """Keys computed with the angles of a longer text are not reused for a shorter one, nor the other way round."""
    forward, ids = runtime(model(name)), PROMPTS[2]
    wanted = forward.prefill(ids[:after], None)
    found, kept = forward.resume(forward.prefill(ids[:before], None, whole=True), ids[:after], None)
    assert kept == (min(before, after - 1) if max(before, after) <= BOUND else 0)
    if found is not None:
        torch.testing.assert_close(found.logits, wanted.logits, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_without_a_cache_too(runtime: Any, name: str) -> None:
    for place in range(3):
        expected = generated(name, place, use_cache=False)
        assert written(runtime(model(name)), [lane(place, use_cache=False)]) == {str(place): expected}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("place", range(3))
def test_rows_that_are_read_again_go_on_as_before(runtime: Any, name: str, place: int) -> None:
    """After a shortage of memory: a cache rebuilt from prompt and text gives the same as the one that grew."""
    model.cache_clear()
    forward = runtime(model(name))
    prefix = forward.prefill(PROMPTS[place], None)
    grown, text = forward.prefill(PROMPTS[place], None).cache, list(PROMPTS[place])
    for token in torch.randint(3, 300, (NEW,), generator=torch.Generator().manual_seed(7)).tolist():
        text.append(token)
        last = forward(Pass(torch.tensor([[token]]), grown, history=torch.tensor([text])))
    anew = forward.reread(torch.tensor([text[:-1]]), prefix)
    found = forward(Pass(torch.tensor([text[-1:]]), anew, history=torch.tensor([text])))
    torch.testing.assert_close(found.logits, last.logits, atol=1e-4, rtol=1e-4)
