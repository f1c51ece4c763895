"""Each field of a config.json changed on its own: it is refused by name, or computed as transformers does.

A field that changes the computation of transformers' class and is neither read nor refused fails here.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
import transformers

from genctl.models.architectures import ARCHITECTURES, read_native
from genctl.native.config import NotNative
from tests import runtimes
from tests.native import seq2seq_variations, variations
from tests.tiny import sharpen
from tests.versions import CACHE, as_loaded, cache_of, corrected

CLOSE = 1e-4  # of the largest number
TEXT = torch.randint(3, 250, (1, 19), generator=torch.Generator().manual_seed(1))
SOURCE = torch.randint(3, 250, (1, 11), generator=torch.Generator().manual_seed(2))
FAMILIES = [*variations.FAMILIES, *seq2seq_variations.FAMILIES]

# Fields that select the class, how a model is stored, or how its class computes the same numbers.
_OTHER_CLASS = {"model_type", "is_encoder_decoder", "transformers_version", "dtype", "_name_or_path", "architectures"}
# Values to add where config.json lacks the field, which a class may still read, some as an older form of today's.
_MISSING = {
    "rope_theta": 500.0,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "partial_rotary_factor": 0.5,
    "sliding_window": 4,
    "head_dim": 16,
    "attention_bias": True,
    "logit_scale": 0.5,
}


def written(family: str) -> dict[str, Any]:
    """config.json of a tiny model of a family."""
    module: Any = variations if family in variations.FAMILIES else seq2seq_variations
    fields = module.model(family).config.to_dict()
    return {name: value for name, value in fields.items() if name not in ("transformers_version", "dtype")}


def others(value: Any) -> Iterator[Any]:
    """Other values that a field of this type may have."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value * 2, value + 1)
    elif isinstance(value, float):
        yield from (value * 1.5 + 0.125, 0.0)
    elif value is None:
        yield from (True, 2, 0.25)
    elif value in ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu"):
        yield "relu" if value != "relu" else "silu"
    elif isinstance(value, list) and len(value) == 2:
        yield value[::-1]
        yield None
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from ({**value, key: other} for other in others(inner))
        yield None


def changes(fields: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in sorted(fields.items()):
        if name not in _OTHER_CLASS:
            yield from ((name, other) for other in others(value))
    yield from ((name, value) for name, value in _MISSING.items() if name not in fields)


def theirs(family: str, config: dict[str, Any]) -> tuple[Any, torch.Tensor] | None:
    """transformers' model with this config.json and its logits; None if its class refuses it."""
    native = ARCHITECTURES[family].native
    assert native is not None
    kind = getattr(transformers, native.model_class)
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            model = kind(corrected(kind.config_class.from_dict(deepcopy(config)))).eval()
            sharpen(as_loaded(model))
            for _, weight in model.named_parameters():
                if weight.ndim < 2 and weight.requires_grad:
                    weight.data += torch.randn_like(weight) * 0.1
            return model, logits(model)  # some configs fail only in a pass
    except Exception:  # whatever it does with a config that makes no sense
        return None


def logits(model: Any) -> torch.Tensor:
    """transformers' logits for the last three tokens of a text, the others being cached: [1, 3, V]."""
    encodes = model.config.is_encoder_decoder
    name, beside = ("decoder_input_ids", {"input_ids": SOURCE}) if encodes else ("input_ids", {})
    with torch.no_grad():
        read = model(**{**beside, name: TEXT[:, :-3]}, use_cache=True)
        made: torch.Tensor = model(**{**beside, name: TEXT[:, -3:], CACHE: cache_of(read)}, use_cache=True).logits
    return made


def ours(model: Any, config: dict[str, Any]) -> torch.Tensor:
    """The same on the native runtime, which reads config.json as it was written."""
    runtime = runtimes.native(model, config)
    cache = runtime.new_cache()
    source = None if runtime.encoder is None else runtime.encoder(SOURCE)
    found = torch.empty(0)
    for begin, end in ((0, TEXT.shape[1] - 3), (TEXT.shape[1] - 3, TEXT.shape[1])):
        positions = torch.arange(begin, end)[None]
        feed, past = TEXT[:, begin:end], begin
        found = runtime.decoder(feed, positions, cache.layers, past=past, source=source, cross=cache.cross)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_changed_field_is_refused_or_computed(family: str) -> None:
    computed, refused, wrong = [], [], []
    fields = written(family)
    for name, value in changes(fields):
        config = {**fields, name: value}
        try:
            read_native(config)
        except NotNative as reason:
            refused.append((name, value, str(reason)))
            continue
        made = theirs(family, config)
        if made is None:
            continue
        model, wanted = made
        found = ours(model, config)
        computed.append((name, value))
        if not ((found - wanted).abs().max() <= CLOSE * wanted.abs().max()):
            wrong.append((name, json.dumps(value)))
    assert wrong == []
    assert len(computed) > 10
