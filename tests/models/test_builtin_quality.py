"""What the model cards of the built-in checkpoints promise."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

import genctl

BUILTIN = Path(genctl.__file__).parent / "models" / "builtin"
DATA = Path(__file__).parents[1] / "data"
OPENINGS = ("Once upon a time", "One day", "The little fox", "Mia was", "In a small village")


@pytest.fixture(scope="module")
def stories() -> genctl.Model:
    return genctl.load("builtin:stories", runtime="transformers")


@pytest.fixture(scope="module")
def numbers() -> genctl.Model:
    return genctl.load("builtin:numbers")


def test_held_out_perplexity_equals_the_model_card(stories: genctl.Model) -> None:
    card = (BUILTIN / "stories" / "README.md").read_text(encoding="utf-8")
    stated = re.search(r"perplexity[^0-9]*\**(\d+\.\d{4})", card)
    assert stated is not None
    total, count = 0.0, 0
    for line in (DATA / "stories_heldout.txt").read_text(encoding="utf-8").splitlines():
        ids = torch.tensor([[*stories.tokenizer(line)["input_ids"], stories.tokenizer.eos_token_id]])
        with torch.no_grad():
            logprobs = stories.model(ids).logits[0, :-1].double().log_softmax(-1)
        total -= float(logprobs.gather(1, ids[0, 1:, None]).sum())
        count += ids.shape[1] - 1
    assert math.exp(total / count) == pytest.approx(float(stated[1]), abs=2e-3)


def test_greedy_stories_end_by_themselves_in_whole_sentences(stories: genctl.Model) -> None:
    for result in stories.generate(list(OPENINGS)):
        (sequence,) = result.sequences
        assert sequence.finish_reason == "eos", sequence.text
        assert sequence.text.rstrip()[-1] in '.!?"'
        assert sequence.text.count('"') % 2 == 0
        sentences = re.split(r"(?<=[.!?])\s+", sequence.text)
        assert len(set(sentences)) > 0.8 * len(sentences), sequence.text


def test_ten_sampled_stories_are_all_different_and_end(stories: genctl.Model) -> None:
    (result,) = stories.generate("Once upon a time", do_sample=True, num_return_sequences=10, seed=1)
    texts = [sequence.text for sequence in result.sequences]
    assert len(set(texts)) == 10
    assert sum(sequence.finish_reason == "eos" for sequence in result.sequences) >= 9


def test_numbers_are_written_exactly(numbers: genctl.Model) -> None:
    pairs = [line.split("\t") for line in (DATA / "numbers_heldout.tsv").read_text().splitlines()][:150]
    pairs += [
        ["0", "zero"],
        ["999999", "nine hundred ninety nine thousand nine hundred ninety nine"],
        ["1000", "one thousand"],
    ]
    results = numbers.generate([digits for digits, _ in pairs], batch_size=64)
    wrong = [digits for (digits, words), result in zip(pairs, results, strict=True) if result.text != words]
    assert len(wrong) <= 0.01 * len(pairs), wrong
