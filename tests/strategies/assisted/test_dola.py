"""DoLa against the texts of transformers 4: see `scripts/make_goldens_dola.py`."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor

from genctl import events
from genctl.decode.loop import decode
from genctl.decode.runtime import ModelRuntime, depth_of
from genctl.decode.types import Lane
from genctl.errors import ModelError
from genctl.strategies.contrast import Dola, candidate_layers
from tests import runtimes
from tests.decode.driver import PROMPTS, Case
from tests.strategies.assisted.checkpoints import NAMES, made
from tests.tiny import tiny

CASES = json.loads((Path(__file__).parents[2] / "goldens" / "dola.json").read_text())["cases"]


@cache
def forward(name: str) -> ModelRuntime:
    return runtimes.forward(made(name))


def lane(case: dict[str, Any], name: str = "0", **fields: Any) -> Lane:
    options = case["options"]
    layers = options["dola_layers"]
    processors: list[Any] = []
    if "repetition_penalty" in options:
        processors.append(RepetitionPenaltyLogitsProcessor(options["repetition_penalty"]))
    if "no_repeat_ngram_size" in options:
        processors.append(NoRepeatNGramLogitsProcessor(options["no_repeat_ngram_size"]))
    strategy = Dola(layers if isinstance(layers, str) else tuple(layers))
    tokens = tuple(case["prompt"])
    return Lane(name, tokens, strategy, len(case["tokens"]), processors=tuple(processors), **fields)


def tokens(found: list[events.Event]) -> dict[str, list[int]]:
    assert not [event for event in found if isinstance(event, events.Failed)]
    return {e.lane: list(e.hypotheses[0].tokens) for e in found if isinstance(e, events.Finished)}


@pytest.mark.parametrize("name", NAMES)
def test_token_ids_are_those_of_transformers_4(name: str) -> None:
    cases = [case for case in CASES if case["model"] == name]
    assert len(cases) == 12
    lanes = [lane(case, str(i)) for i, case in enumerate(cases)]
    expected = {str(i): case["tokens"] for i, case in enumerate(cases)}
    assert tokens(list(decode(forward(name), lanes, width=12))) == expected


def test_it_runs_without_a_cache_and_alone() -> None:
    case = CASES[0]
    assert tokens(list(decode(forward(case["model"]), [lane(case, use_cache=False)]))) == {"0": case["tokens"]}


def test_drawn_rows_go_their_own_ways_and_repeat_with_the_seed() -> None:
    fields: dict[str, Any] = {"max_new_tokens": 20, "eos": (), "returned": 3, "seed": 5}
    drawn = Lane("0", (5, 6, 7, 8), Dola("high", True, 3), processors=(lambda history, scores: scores / 6,), **fields)
    one, two = ([e for e in decode(forward("llama"), [drawn]) if isinstance(e, events.Finished)] for _ in range(2))
    texts = [hypothesis.tokens for hypothesis in one[0].hypotheses]
    assert texts == [hypothesis.tokens for hypothesis in two[0].hypotheses]
    assert len(set(texts)) == 3


def test_traces_begin_with_the_contrast() -> None:
    case = next(case for case in CASES if "repetition_penalty" in case["options"])
    steps = [e for e in decode(forward(case["model"]), [lane(case, trace=True)]) if isinstance(e, events.Stepped)]
    first = (*steps[0].rows, *steps[0].ended)[0].written[0]
    with torch.no_grad():
        logits = made(case["model"])(torch.tensor([case["prompt"]])).logits[0, -1]
    assert len(first.trace) == 1
    # the tokens that DoLa excluded are already gone, so the penalty is applied to a sharper distribution
    assert first.trace[0].before != pytest.approx(float(logits.softmax(-1)[first.id]), abs=1e-4)


@pytest.mark.parametrize(
    ("layers", "changes", "expected"),
    [
        ("low", {}, [0]),
        ("high", {}, [1]),
        ("low", {"num_hidden_layers": 9}, [0, 2]),
        ("high", {"num_hidden_layers": 9}, [4, 6, 8]),
        ("low", {"num_hidden_layers": 9, "tie_word_embeddings": True}, [2]),
        ("low", {"tie_word_embeddings": True}, [1]),
        ((1, 0, 1), {}, [1, 0]),
    ],
)
def test_candidate_layers_are_those_of_transformers_4(
    layers: Any, changes: dict[str, Any], expected: list[int]
) -> None:
    model = runtimes.forward(tiny("llama", **changes))
    assert candidate_layers(model, layers, depth_of(model)) == expected


def test_what_dola_cannot_do_is_refused() -> None:
    for arch, why in (("t5", "encoder-decoder"), ("mamba", "recurrent states")):
        case = Case(arch)
        failed = [e for e in decode(case.forward, [case.lane(PROMPTS[0], Dola())]) if isinstance(e, events.Failed)]
        assert why in failed[0].message
    for layers, why in (((2,), "has no layer 2"), ((-1,), "has no layer -1"), ((), "needs at least one")):
        with pytest.raises(ModelError, match=why):
            candidate_layers(runtimes.forward(tiny("llama")), layers, 2)
    with pytest.raises(ModelError, match="too few layers"):
        candidate_layers(runtimes.forward(tiny("llama", num_hidden_layers=3, tie_word_embeddings=True)), "low", 3)
