"""transformers' processors through our table: the tokens of `generate`, one by one and in combination."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, SynthIDTextWatermarkingConfig, WatermarkingConfig

from genctl.config.listed_knobs import PROCESSORS
from genctl.decode.processors.build import build
from tests import tiny
from tests.decode.processors.plain import NEW, PROMPT, generated, material, write
from tests.versions import OLDER, needs_newest

Knobs = dict[str, Any]

PENALTIES: list[Knobs] = [
    {"sequence_bias": [([17], 3.0), ([44, 90], 5.0), ([8], -2.0)]},
    {"encoder_repetition_penalty": 1.6},
    {"repetition_penalty": 1.4},
    {"no_repeat_ngram_size": 2},
    {"encoder_no_repeat_ngram_size": 2},
    {"bad_words_ids": [[17], [44, 90], [tiny.EOS]]},
    {"min_length": 11},
    {"min_new_tokens": 6},
    {"forced_bos_token_id": 33},
    {"forced_eos_token_id": tiny.EOS},
    {"forced_eos_token_id": [tiny.EOS, 77]},
    {"remove_invalid_values": True},
    {"exponential_decay_length_penalty": (3, 1.5)},
    {"suppress_tokens": list(range(20, 120))},
    {"begin_suppress_tokens": list(range(100, 300))},
    {"renormalize_logits": True},
    {"watermarking_config": {"bias": 4.0}},
    {"watermarking_config": {"seeding_scheme": "selfhash", "context_width": 2}},
    {"watermarking_config": {"ngram_len": 3, "keys": [654, 400, 836], "context_history_size": 4}},
    {"watermarking_config": {"ngram_len": 4, "keys": [654, 400], "skip_first_ngram_calls": True}},
]
WARPERS: list[Knobs] = [
    {"temperature": 0.7}, {"temperature": 1.6}, {"top_h": 0.5}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.1},
    {"typical_p": 0.7}, {"epsilon_cutoff": 0.02}, {"eta_cutoff": 0.05},
]  # fmt: skip


def combinations(count: int) -> list[Knobs]:
    """Two to five processors at once, no knob twice, always the same ones."""
    chooser = random.Random(7)
    found = []
    for _ in range(count):
        together: Knobs = {}
        for knobs in chooser.sample(PENALTIES, chooser.randint(1, 3)) + chooser.sample(WARPERS, chooser.randint(1, 3)):
            together |= knobs
        found.append(together)
    return found


def foreign(knobs: Knobs) -> Knobs:
    """The knobs as `generate` takes them."""
    changed = dict(knobs)
    if "watermarking_config" in knobs:
        fields = knobs["watermarking_config"]
        kind = SynthIDTextWatermarkingConfig if "keys" in fields else WatermarkingConfig
        changed["watermarking_config"] = kind(**fields)
    if "sequence_bias" in knobs:
        changed["sequence_bias"] = [[ids, bias] for ids, bias in knobs["sequence_bias"]]
    return changed


def name(knobs: Knobs) -> str:
    return "-".join(knobs)


def agree(arch: str, knobs: Knobs, do_sample: bool, seed: int) -> None:
    model = tiny.tiny(arch)
    made = material(arch=arch, do_sample=do_sample, **knobs)
    expected = generated(model, made, seed, do_sample=do_sample, **foreign(knobs))
    assert write(model, made, seed) == expected


@pytest.mark.parametrize("knobs", PENALTIES + WARPERS, ids=name)
@pytest.mark.parametrize("arch", ["gpt2", "t5"])
def test_each_processor_alone_writes_the_tokens_of_generate(arch: str, knobs: Knobs) -> None:
    agree(arch, knobs, True, 1)
    if knobs in PENALTIES:
        agree(arch, knobs, False, 0)


@pytest.mark.parametrize("knobs", combinations(48), ids=name)
@pytest.mark.parametrize("arch", ["gpt2", "t5"])
def test_combinations_write_the_tokens_of_generate(arch: str, knobs: Knobs) -> None:
    if OLDER and {"exponential_decay_length_penalty", "top_h"} <= {*knobs}:
        pytest.skip("older versions make NaN of a removed EOS, which their Top-H refuses")
    agree(arch, knobs, True, len(knobs))
    agree(arch, {key: value for key, value in knobs.items() if {key: value} not in WARPERS}, False, 0)


@pytest.mark.parametrize("negative", [None, [9, 61, 140]])
@pytest.mark.parametrize("do_sample", [False, True])
def test_guidance_writes_the_tokens_of_generate(negative: list[int] | None, do_sample: bool) -> None:
    model = tiny.tiny("gpt2")

    def unconditional(history: torch.Tensor) -> torch.Tensor:
        start = torch.tensor([negative or PROMPT[-1:]])
        with torch.no_grad():
            found: torch.Tensor = model(torch.cat([start, history[:, len(PROMPT) :]], 1)).logits[:, -1]
        return found

    made = material(do_sample=do_sample, guidance_scale=1.7, unconditional=unconditional)
    given = {} if negative is None else {"negative_prompt_ids": torch.tensor([negative])}
    expected = generated(model, made, 4, do_sample=do_sample, guidance_scale=1.7, **given)
    assert write(model, made, 4) == expected


@needs_newest("penalise the tokens of a source in the first row only")
@pytest.mark.parametrize("eos", [(), (tiny.EOS,), (tiny.EOS, 9)])
@pytest.mark.parametrize("beams", [1, 4])
def test_scores_and_order_are_those_of_transformers_list(beams: int, eos: tuple[int, ...]) -> None:
    """Also with beams, where filters keep one token more than may end a row. Not SynthID, whose list keeps a state."""
    model, scores = tiny.tiny("gpt2"), torch.randn(3, tiny.VOCABULARY, generator=torch.Generator().manual_seed(0)) * 4
    history = torch.tensor([[*PROMPT, 17, 44], [*PROMPT, 90, 3], [*PROMPT, 17, 8]])
    for knobs in combinations(60):
        if "keys" in knobs.get("watermarking_config", ()) or ("exponential_decay_length_penalty" in knobs and not eos):
            continue
        made = material(do_sample=True, eos=eos, num_beams=beams, **knobs)
        defaults = GenerationConfig(top_k=0)._get_default_generation_params()
        config = GenerationConfig(**(defaults | {"do_sample": True, "top_k": 0, "num_beams": beams} | foreign(knobs)))
        if config.min_new_tokens is not None:
            config.min_length = config.min_new_tokens + made.prompt_len
        config.max_length = made.max_length
        config._eos_token_tensor = torch.tensor(eos) if eos else None
        theirs = model._get_logits_processor(
            config, made.prompt_len, encoder_input_ids=made.encoder_ids, device="cpu", model_kwargs={}
        )
        ours = build(made)
        expected = [
            type(processor).__name__ for processor in theirs if type(processor).__name__ != "MinLengthLogitsProcessor"
        ]
        sources = {entry.name: entry.source.split(",")[0] for entry in PROCESSORS.values()}
        assert [sources[p.name] for p in ours if p.name != "min_length"] == expected
        processed = scores
        for processor in ours:
            processed = processor(history, processed)
        assert torch.equal(processed, theirs(history, scores)), knobs


def test_synthid_does_not_care_where_a_row_stands() -> None:
    """transformers' own keeps contexts by row number; ours gives a row that moved the same as alone."""
    made = material(do_sample=True, watermarking_config={"ngram_len": 3, "keys": [654, 400, 836]})
    history = torch.tensor([[*PROMPT, *range(40, 44)], [*PROMPT, *range(60, 64)]])
    scores = torch.randn(2, tiny.VOCABULARY, generator=torch.Generator().manual_seed(0))
    (processor,) = build(made)
    together = processor(history, scores)
    assert torch.equal(processor(history.flip(0), scores.flip(0)).flip(0), together)
    assert torch.equal(processor(history[:1], scores[:1]), together[:1])


def test_a_repeated_context_is_not_watermarked_again() -> None:
    made = material(prompt=[5], do_sample=True, watermarking_config={"ngram_len": 3, "keys": [654, 400, 836]})
    (processor,) = build(made)
    scores = torch.randn(1, tiny.VOCABULARY, generator=torch.Generator().manual_seed(0))
    fresh, repeated = torch.tensor([[5, 8, 9, 10, 11]]), torch.tensor([[5, 8, 9, 8, 9]])
    assert not torch.equal(processor(fresh, scores), scores)
    assert torch.equal(processor(repeated, scores), scores)


def test_min_length_acts_until_it_is_reached() -> None:
    (processor,) = build(material(min_length=len(PROMPT) + 2))
    scores = torch.zeros(1, tiny.VOCABULARY)
    for written in range(NEW):
        history = torch.tensor([PROMPT + [9] * written])
        assert (processor(history, scores)[0, tiny.EOS] == -torch.inf) == (written < 2)
