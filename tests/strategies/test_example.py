"""The strategy that the documentation shows works as it says."""

from __future__ import annotations

import dataclasses
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from genctl.decode.types import Choice, Independent, Strategy, Traits
from tests.decode.driver import NEW, PROMPTS, Case

FILE = Path(__file__).parents[2] / "docs" / "second_best.py"


@pytest.fixture(scope="module")
def second_best() -> Any:
    return runpy.run_path(str(FILE), run_name="second_best")["SecondBest"]()


def test_the_example_is_a_strategy_in_a_short_file(second_best: Any) -> None:
    assert isinstance(second_best, Strategy)
    assert not isinstance(second_best, Independent)
    assert len(FILE.read_text().splitlines()) < 100


@pytest.mark.parametrize("arch", ["gpt2", "t5"])
def test_the_example_writes_the_second_best_token_at_every_step(second_best: Any, arch: str) -> None:
    case = Case(arch)
    lanes = [case.lane(prompt, second_best, str(number), eos=()) for number, prompt in enumerate(PROMPTS)]
    found = case.ours(lanes, width=3)
    for number, prompt in enumerate(PROMPTS):
        written = list(found[str(number)][0])
        assert len(written) == NEW
        with torch.no_grad():
            if case.encoder_decoder:
                logits = case.model(
                    input_ids=torch.tensor([prompt]), decoder_input_ids=torch.tensor([[case.start, *written[:-1]]])
                ).logits[0]
            else:
                logits = case.model(torch.tensor([[*prompt, *written[:-1]]])).logits[0, len(prompt) - 1 :]
        assert written == logits.topk(2).indices[:, 1].tolist()


def test_the_page_lists_what_a_strategy_and_a_choice_have() -> None:
    page = (FILE.parent / "strategies.md").read_text(encoding="utf-8")
    attributes, traits, choice = (part.split("\n\n")[0] for part in page.split("|---|---|\n")[1:])
    names = [name for name, value in vars(Strategy).items() if isinstance(value, property)]
    assert re.findall(r"^\| `(\w+)`", attributes, re.MULTILINE) == names
    assert re.findall(r"^\| `(\w+)`", traits, re.MULTILINE) == [field.name for field in dataclasses.fields(Traits)]
    listed = {"rows", "tokens", *re.findall(r"^\| `(\w+)`", choice, re.MULTILINE)}
    assert listed == {field.name for field in dataclasses.fields(Choice)}
