"""`processed_logprobs`: the log-probability of each token in the distribution that is sampled from."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import genctl
from tests.cli.tool import genctl as tool
from tests.tiny import checkpoint

PROMPT = [5, 9, 11, 9]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint("llama", tmp_path_factory.mktemp("model") / "llama")


@pytest.mark.parametrize(
    "knobs",
    [
        {"repetition_penalty": 1.4},
        {"do_sample": True, "temperature": 0.7, "top_k": 8, "seed": 5},
        {"do_sample": True, "top_p": 0.6, "top_k": 0, "seed": 5, "num_return_sequences": 2},
        {"num_beams": 3, "no_repeat_ngram_size": 2},
        {"prompt_lookup_num_tokens": 3, "repetition_penalty": 1.2},
    ],
)
def test_it_is_that_of_the_processors_of_generate(folder: Path, knobs: dict[str, Any]) -> None:
    (result,) = genctl.load(str(folder)).generate(
        [PROMPT], max_new_tokens=6, processed_logprobs=True, eos_token_id=None, **knobs
    )
    model = AutoModelForCausalLM.from_pretrained(folder)
    own = {
        key: value
        for key, value in knobs.items()
        if key not in ("seed", "num_return_sequences", "num_beams", "prompt_lookup_num_tokens")
    }
    for sequence in result.sequences:
        for place, token in enumerate(sequence.tokens):
            ids = torch.tensor([[*PROMPT, *sequence.hypothesis.tokens[:place]]])
            step = model.generate(
                ids, max_new_tokens=1, output_scores=True, return_dict_in_generate=True, pad_token_id=0, **own
            )
            expected = step.scores[0].log_softmax(-1)[0, token.id]
            assert token.processed is not None
            assert math.isclose(token.processed, float(expected), abs_tol=1e-4)


def test_records_and_events_have_it_on_request_alone(tmp_path: Path) -> None:
    flags = ["run", "Once upon a time", "-n", "2", "--format", "jsonl", "--repetition-penalty", "1.3"]
    assert "tokens" not in tool(*flags).records[0]
    assert "processed" not in tool(*flags, "--scores").records[0]["tokens"][0]
    events = tmp_path / "events.jsonl"
    (record,) = tool(*flags, "--set", "processed_logprobs=true", "--events", str(events)).records
    assert all(token["processed"] <= 0.0 for token in record["tokens"])
    steps = [json.loads(line) for line in events.read_text().splitlines() if '"stepped"' in line]
    assert steps[0]["rows"][0]["written"][0]["processed"] == record["tokens"][0]["processed"]
    done = tool(
        *flags[:1], "--input", "-", "--input-format", "jsonl", *flags[2:],
        stdin='{"prompt": "Once", "params": {"processed_logprobs": true}}\n{"prompt": "Once"}\n',
    )  # fmt: skip
    first, second = done.records
    assert first["tokens"][0]["processed"] <= 0.0
    assert "processed" not in json.dumps(second)


def test_a_search_with_scores_of_its_own_has_none() -> None:
    (record,) = tool(
        "run", "Once", "-n", "2", "--format", "jsonl", "--set", "processed_logprobs=true", "--dola-layers", "low"
    ).records
    assert [token["processed"] for token in record["tokens"]] == [None, None]
