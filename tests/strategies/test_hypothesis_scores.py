"""The log-probability of every hypothesis equals that of one pass over its text without a cache.

`generate()` does not reorder the states of MiniMax and RecurrentGemma, so its scores are not those of its texts, and it
refuses RWKV beams with a cache: for these it cannot be the oracle.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import genctl
from tests.tiny import EOS
from tests.zoo import recipes
from tests.zoo.compare import PROMPTS, quiet

STATES = ["causal/minimax", "causal/recurrent_gemma", "causal/rwkv", "causal/nemotron_h", "causal/mamba2"]
PLAIN = ["causal/llama", "causal/mistral", "causal/gpt2", "causal/phi3", "causal/bart"]
ENDS = [EOS, *range(40, 80)]  # some beams end early, so lengths differ
BEAMS: dict[str, Any] = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 12, "eos_token_id": ENDS}


def total(model: Any, prompt: tuple[int, ...], tokens: list[int]) -> float:
    """The log-probability of tokens after a prompt, from one pass."""
    ids = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        logprobs = model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
    return sum(float(logprobs[len(prompt) - 1 + place, token]) for place, token in enumerate(tokens))


@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
@pytest.mark.parametrize("name", [*STATES, *PLAIN])
def test_the_score_of_a_hypothesis_is_that_of_its_text(name: str, together: bool, tmp_path: Path) -> None:
    penalty = 0.5
    with quiet():
        folder = recipes.make(name, tmp_path)
        ours = genctl.load(str(folder), device="cpu")
        theirs = recipes.auto_class(name).from_pretrained(folder).eval()
        settings = {**BEAMS, "length_penalty": penalty, "batch_size": len(PROMPTS) if together else 1}
        results = ours.generate([list(prompt) for prompt in PROMPTS], **settings)
        lengths = set()
        for prompt, result in zip(PROMPTS, results, strict=True):
            for hypothesis in result.sequences:
                tokens = [token.id for token in hypothesis.tokens]
                lengths.add(len(tokens))
                wanted = total(theirs, prompt, tokens)
                assert sum(token.logprob for token in hypothesis.tokens) == pytest.approx(wanted, abs=2e-3)
                assert hypothesis.score == pytest.approx(wanted / len(tokens) ** penalty, abs=2e-3)
    assert len(lengths) > 1


@pytest.mark.parametrize("penalty", [-0.5, 0.5, 2.0])
def test_nemotron_h_beams_are_those_of_generate(penalty: float, tmp_path: Path) -> None:
    with quiet():
        folder = recipes.make("causal/nemotron_h", tmp_path)
        ours = genctl.load(str(folder), device="cpu")
        theirs = recipes.auto_class("causal/nemotron_h").from_pretrained(folder).eval()
        settings = {**BEAMS, "length_penalty": penalty}
        for prompt in PROMPTS:
            ids = torch.tensor([prompt])
            options = {"return_dict_in_generate": True, "output_scores": True, "do_sample": False, **settings}
            made = theirs.generate(ids, attention_mask=torch.ones_like(ids), **options)
            found = ours.generate([list(prompt)], **settings)[0].sequences
            assert [one.score for one in found] == pytest.approx(made.sequences_scores.tolist(), rel=1e-4)
