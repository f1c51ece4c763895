"""Layers in unusual places: decoders with another depth than their encoders, states kept in modules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from genctl import events
from genctl.commands.inspect.plan import plan
from genctl.config.layers import flags_layer
from genctl.engines.protocol import Flow, Request
from genctl.engines.session import Session
from genctl.params import Generation, Runtime
from tests.tiny import checkpoint, tiny, tokenizer

TEXT = "the cat sat"
STEPS = 4


def read(folder: Path, *prompts: str, **knobs: Any) -> tuple[Session, list[events.CacheRead], list[tuple[int, ...]]]:
    """An observed run: the session, the cache's content after each pass, and the best tokens of each prompt."""
    session = Session.load(Runtime(model=str(folder), device="cpu"))
    resolved = session.resolve([flags_layer({"max_new_tokens": STEPS + 1, "min_new_tokens": STEPS + 1, **knobs})])
    requests = [Request(str(place), resolved, 7, prompt) for place, prompt in enumerate(prompts)]
    seen = list(session.stream(requests, None, Flow(len(requests), watch=True)))
    assert not [event for event in seen if isinstance(event, events.Failed)]
    return (
        session,
        [event for event in seen if isinstance(event, events.CacheRead)],
        [event.hypotheses[0].tokens for event in seen if isinstance(event, events.Finished)],
    )


def planned(folder: Path, length: int, source: int | None = None, **knobs: Any) -> dict[str, Any]:
    return plan(
        Runtime(model=str(folder), device="cpu"), Generation(**knobs), batch=1, length=length, source_length=source
    )


def told(layers: Any) -> list[dict[str, Any]]:
    return [{key: value for key, value in layer.items() if key != "new"} for layer in layers]


@pytest.mark.parametrize(
    ("arch", "fields", "depth"),
    [
        ("t5", {"num_layers": 2, "num_decoder_layers": 3}, 3),
        ("t5", {"num_layers": 3, "num_decoder_layers": 1}, 1),
        ("bart", {"encoder_layers": 1, "decoder_layers": 3}, 3),
        ("bart", {"encoder_layers": 3, "decoder_layers": 1}, 1),
    ],
)
def test_a_decoder_of_another_depth_than_its_encoder(
    arch: str, fields: dict[str, int], depth: int, tmp_path: Path
) -> None:
    folder = checkpoint(arch, tmp_path, **fields)
    _, reads, written = read(folder, TEXT)
    found = told(reads[-1].layers)
    kinds = [(layer["layer"], layer["kind"]) for layer in found]
    assert kinds == [(n, "full") for n in range(depth)] + [(n, "cross-attention") for n in range(depth)]
    source = tokenizer().encode(TEXT)
    made = planned(folder, STEPS + 1, len(source))
    assert (made["layers"], made["reserved_bytes"]) == (found, reads[-1].reserved)
    assert naive(tiny(arch, **fields), source) == list(written[0])
    for knobs in ({"num_beams": 3}, {"cache_implementation": "static"}, {"cache_implementation": "quantized"}):
        assert len(read(folder, TEXT, "a dog", **knobs)[2]) == 2


def naive(model: Any, source: list[int]) -> list[int]:
    """Greedy search that reads everything again at every step."""
    ids = [model.config.decoder_start_token_id]
    for _ in range(STEPS + 1):
        with torch.no_grad():
            logits = model(
                input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([ids]), use_cache=False
            ).logits[0, -1]
        logits[model.generation_config.eos_token_id] = -torch.inf
        ids.append(int(logits.argmax()))
    return ids[1:]


def test_states_that_a_model_keeps_in_its_modules_are_shown(tmp_path: Path) -> None:
    import transformers

    config = transformers.RecurrentGemmaConfig(
        vocab_size=300, hidden_size=32, lru_width=24, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=1, head_dim=8, intermediate_size=64, attention_window_size=8,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(1)
    transformers.RecurrentGemmaForCausalLM(config).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    _, reads, _ = read(tmp_path, TEXT)
    found = told(reads[-1].layers)
    assert [(layer["layer"], layer["kind"]) for layer in found] == [
        (0, "recurrent state"),
        (1, "recurrent state"),
        (2, "sliding window"),
    ]
    for entry in found[:2]:
        assert entry["states"] == {"conv": [1, 24, config.conv1d_width - 1], "recurrent": [1, 24]}
        assert entry["bytes"] == (24 * (config.conv1d_width - 1) + 24) * 4
    assert reads[-1].reserved >= sum(layer["bytes"] for layer in found)
    made = planned(tmp_path, len(tokenizer().encode(TEXT)) + STEPS)
    assert made["layers"] == found
    assert made["total_bytes"] == sum(layer["bytes"] for layer in found)
    assert json.dumps(made)
