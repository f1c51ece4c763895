"""The result of a prompt does not depend on batch size, neighbours or order: every mode, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from genctl import api
from genctl.engines.protocol import Flow, Report, Request
from genctl.events.results import Collector, Result
from tests.tiny import tiny

PROMPTS = [tuple(range(5 + 3 * n, 9 + 7 * n)) for n in range(5)]  # of 4 to 20 tokens
LONG = [tuple((7 * i + 3 * n) % 290 + 5 for i in range(70 + 2 * n)) for n in range(2)]  # whose beams share a prompt

MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy with penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 4},
    "static": {"cache_implementation": "static"},
    "no cache": {"use_cache": False},
    "sample": {"do_sample": True, "top_p": 0.9, "temperature": 0.8},
    "sample three": {"do_sample": True, "top_k": 20, "num_return_sequences": 3},
    "inverse cdf": {"do_sample": True, "sampler": "inverse-cdf"},
    "counter": {"do_sample": True, "sampler": "counter"},
    "mirostat": {"do_sample": True, "mirostat_tau": 3.0},
    "adaptive-p": {"do_sample": True, "adaptive_target": 0.4, "min_k": 3.0},
    "p-less": {"do_sample": True, "p_less": "norm", "temperature": 2.0},
    "ban": {"do_sample": True, "ban": ["a", "e ", "in", "th"]},
    "thought": {"thinking_budget": 3, "thinking_tags": ("t", "</t>")},
    "dry and xtc": {"do_sample": True, "dry_multiplier": 0.8, "xtc_probability": 0.5, "xtc_threshold": 0.05},
    "beam": {"num_beams": 4, "num_return_sequences": 4, "length_penalty": 0.7},
    "beam sample": {"num_beams": 3, "do_sample": True, "num_return_sequences": 2},
    "diverse beam": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "constrained beam": {"num_beams": 4, "force_words_ids": [[40, 41]]},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4},
    "prompt lookup": {"prompt_lookup_num_tokens": 4},
    "assisted": {"assistant_model": "SECOND"},
    "early exit": {"assistant_early_exit": 1},
    "contrastive decoding": {"amateur_model": "SECOND"},
    "dola": {"dola_layers": "high"},
    "guidance": {"guidance_scale": 1.5, "do_sample": True},
    "best of": {"best_of": 4, "do_sample": True},
    "regex": {"regex": "[a-z ]{4,30}"},
}
DECODERS_ONLY = {"early exit", "contrastive decoding", "dola", "guidance", "contrastive", "prompt lookup", "assisted"}
MATRIX = [(arch, mode) for arch in ("gpt2", "mistral") for mode in MODES]
MATRIX += [("t5", mode) for mode in MODES if mode not in DECODERS_ONLY]
MATRIX += [("bart", mode) for mode in ("greedy", "sample", "beam")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for arch in ("gpt2", "mistral", "t5", "bart"):
        found[arch] = tmp_path_factory.mktemp(arch)
        tiny(arch, found[arch])
        found[f"{arch} second"] = tmp_path_factory.mktemp(f"{arch}-second")
        tiny(arch, found[f"{arch} second"], seed=1)
    return found


@pytest.fixture(scope="module")
def models(folders: dict[str, Path]) -> dict[str, api.Model]:
    return {arch: api.load(str(folder)) for arch, folder in folders.items() if " " not in arch}


def decoded(model: api.Model, settings: dict[str, Any], prompts: list[tuple[str, tuple[int, ...]]], width: int) -> Any:
    """Token ids by prompt name. Each prompt has its own seed, as in a batch."""
    resolved = model._session.resolve([*model._layers, api.Layer("argument", settings, {}, "command")])
    requests = [Request(name, resolved, 100 + len(ids), prompt_ids=ids) for name, ids in prompts]
    collector, found = Collector(), {}
    for event in model._session.stream(requests, Report(), Flow(width)):
        result = collector.feed(event)
        if result is not None:
            found[result.lane] = ids_of(result)
    return found


def ids_of(result: Result) -> Any:
    return result.error.message if result.error else [sequence.token_ids for sequence in result.sequences]


@pytest.mark.parametrize(("arch", "mode"), MATRIX, ids=[f"{arch}-{mode.replace(' ', '-')}" for arch, mode in MATRIX])
def test_a_prompt_alone_in_a_batch_and_in_another_order(
    arch: str, mode: str, models: dict[str, api.Model], folders: dict[str, Path]
) -> None:
    settings = {"max_new_tokens": 8, **MODES[mode]}
    settings = {key: str(folders[f"{arch} second"]) if value == "SECOND" else value for key, value in settings.items()}
    prompts = [(str(place), ids) for place, ids in enumerate(PROMPTS + LONG)]
    alone = decoded(models[arch], settings, prompts, 1)
    assert len(alone) == len(prompts)
    assert not any(isinstance(found, str) for found in alone.values()), alone
    for width, order in ((len(prompts), prompts), (3, prompts[::-1])):
        assert decoded(models[arch], settings, order, width) == alone


def test_every_strategy_has_its_row() -> None:
    """No new strategy can be left out."""
    from genctl.config.modes import NAMED

    rows = {mode.replace(" ", "-") for mode in MODES}
    covered = {"best_of": "best-of", "mbr": "best-of"}  # both choose among plain samples
    assert {covered.get(name, name) for name in NAMED} <= rows
