"""A pass that is one call of the library gives every row the bits of the decoder's own code."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from genctl import events
from genctl.decode.loop import decode
from genctl.decode.runtime import Pass
from genctl.decode.types import Lane
from genctl.engines.session import Session
from genctl.kernels.ops import library
from genctl.native.runtime import NativeRuntime
from genctl.native.steps import MOST_BYTES, ROOM, Steps
from genctl.params import Runtime
from genctl.strategies.assisted import Assisted
from genctl.strategies.beam import Beam
from genctl.strategies.drafters import PromptLookup
from genctl.strategies.sample import Sample
from tests import runtimes
from tests.native import seq2seq_variations
from tests.native.variations import FAMILIES, VARIATIONS, model
from tests.tiny import EOS, VOCABULARY, WINDOW

pytestmark = pytest.mark.skipif(library() is None, reason="nothing is compiled here")

# experts, sinks, clipped queries or ones that are an uneven part of a product: computed by the decoder's own code
ELSEWHERE = {"codegen", "gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe"}
CLIPPED_OR_UNEVEN = {"olmo, clipped", "mpt, clipped", "falcon, new", "falcon, new with one norm"}
EVEN = {"codegen, four heads"}


def prompt(length: int) -> tuple[int, ...]:
    return tuple(torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(length)).tolist())


LANES: dict[str, Callable[[], Sequence[Lane]]] = {
    "one row": lambda: [Lane("a", prompt(9), Sample(), 2 * WINDOW, eos=(EOS,))],
    "padded rows": lambda: [Lane(str(n), prompt(n), Sample(), 12, eos=(EOS,)) for n in (5, 70, 11)],
    "beams that share a prompt": lambda: [Lane(str(n), prompt(n), Beam(3), 8, eos=(EOS,), returned=3) for n in (80, 9)],
    "drafts": lambda: [Lane("a", prompt(6) * 4, Assisted(PromptLookup(), num_assistant_tokens=5), 24, eos=(EOS,))],
}


def passes(runtime: NativeRuntime, lanes: Sequence[Lane]) -> list[Any]:
    """The logits of every pass, and what was written."""
    logits: list[Any] = []
    once = type(runtime).__call__

    class Noted(NativeRuntime):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            output = once(self, *args, **kwargs)
            logits.append(output.logits)
            return output

    noted = Noted.__new__(Noted)
    noted.__dict__.update(runtime.__dict__)
    told = list(decode(noted, lanes, width=8))
    assert not [event for event in told if isinstance(event, events.Failed)]
    texts = [event.hypotheses for event in told if isinstance(event, events.Finished)]
    return [*logits, *[(one.tokens, one.logprob) for text in texts for one in text]]


def same(ones: list[Any], others: list[Any]) -> bool:
    return len(ones) == len(others) and all(
        torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
        for one, other in zip(ones, others, strict=True)
    )


def check(runtime: NativeRuntime, make: Callable[[], Sequence[Lane]]) -> int:
    """The number of passes that were one call. They must change nothing."""
    runtime.steps = steps = Steps(runtime.decoder)
    with_steps = passes(runtime, make())
    runtime.steps = None
    assert same(with_steps, passes(runtime, make()))
    return steps.taken


def written(name: str, kind: str) -> Sequence[Lane]:
    """Lanes of an encoder-decoder, with sources of several lengths."""
    begin = (int(seq2seq_variations.model(name).config.decoder_start_token_id),)
    if kind == "drafts":
        drafts = Assisted(PromptLookup(), num_assistant_tokens=5)
        return [Lane("a", begin, drafts, 12, source=prompt(6) * 3)]
    strategy, returned = (Beam(3), 3) if "beams" in kind else (Sample(), 1)
    lengths, eos = ((17,) if "one" in kind else (6, 17, 11)), ((EOS,) if "beams" in kind else ())
    return [
        Lane(str(length), begin, strategy, 4 + length, eos=eos, source=prompt(length), returned=returned)
        for length in lengths
    ]


@pytest.mark.parametrize("kind", LANES)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_the_bits_of_its_decoder(name: str, kind: str) -> None:
    runtime = runtimes.native(model(name))
    assert (check(runtime, LANES[kind]) > 0) == (name not in ELSEWHERE)


@pytest.mark.parametrize("name", [name for name in VARIATIONS if name not in FAMILIES])
def test_every_variation_of_a_family_has_the_bits_of_its_decoder(name: str) -> None:
    family = name.partition(",")[0]
    elsewhere = name in CLIPPED_OR_UNEVEN or (family in ELSEWHERE and name not in EVEN)
    for kind in ("padded rows", "drafts"):
        assert (check(runtimes.native(model(name)), LANES[kind]) > 0) == (not elsewhere)


@pytest.mark.parametrize("kind", ["one row", "several rows", "one source, beams", "several sources, beams", "drafts"])
@pytest.mark.parametrize("name", seq2seq_variations.VARIATIONS)
def test_every_encoder_decoder_has_the_bits_of_its_decoder(name: str, kind: str) -> None:
    assert check(runtimes.native(seq2seq_variations.model(name)), lambda: written(name, kind)) > 0


@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_type_of_weights_has_the_bits_of_the_decoder(dtype: str, quantize: str | None) -> None:
    if dtype == "float16" and quantize:
        pytest.skip("--quantize computes in float32 or bfloat16")
    runtime = Session.load(Runtime(model="builtin:stories", dtype=dtype, quantize=quantize)).forward  # type: ignore[arg-type]
    assert isinstance(runtime, NativeRuntime)
    for kind in LANES:
        assert check(runtime, LANES[kind])


def test_very_long_passes_and_other_forms_of_a_cache_are_left_to_the_decoder() -> None:
    runtime = runtimes.native(model("llama"))
    many = MOST_BYTES // (4 * 300)  # rows whose buffers exceed it
    taken: list[int] = []
    for rows, form in ((2, ""), (many, ""), (2, "quantized"), (2, "static")):
        cache = runtime.new_cache(room=80)
        runtime(Pass(torch.tensor([prompt(4)]).expand(rows, -1), cache, first=True))
        if form:
            cache.convert(form, 80)
        assert runtime.steps is not None
        before = runtime.steps.taken
        runtime(Pass(torch.tensor([prompt(70)[:1]]).expand(rows, -1), cache))
        taken.append(runtime.steps.taken - before)
    assert taken == [1, 0, 0, 1]


def test_a_decoder_with_a_part_of_another_kind_is_computed_by_its_own_code() -> None:
    for part in ("attn_norm", "o", "mlp"):
        runtime = runtimes.native(model("llama"))
        layer = runtime.decoder.weights.layers[1]
        whole = getattr(layer, part)
        setattr(layer, part, lambda x, whole=whole: whole(x))
        assert check(runtime, LANES["one row"]) == 0


def test_a_decoder_whose_activations_are_float64_for_a_while_is_computed_by_its_own_code() -> None:
    runtime = runtimes.native(model("llama"))
    assert runtime.steps is not None
    cache = runtime.new_cache()
    runtime(Pass(torch.tensor([prompt(4)]), cache, first=True))
    runtime.decoder.dtype = torch.float64
    assert runtime.steps.step(torch.tensor([[5]]), cache, None, torch.tensor([[4]]), cache.length) is None
    runtime.decoder.dtype = torch.float32
    assert runtime.steps.step(torch.tensor([[5]]), cache, None, torch.tensor([[4]]), cache.length) is not None


def test_one_list_serves_passes_of_all_shapes_and_keeps_no_cache_in_memory() -> None:
    runtime = runtimes.native(model("gpt2"))
    assert runtime.steps is not None
    held, lists = [], set()
    for rows, fed in ((1, 1), (1, 7), (5, 2), (3, 1), (1, ROOM), (ROOM, 1), (2, ROOM), (1, 2)):
        cache = runtime.new_cache()
        runtime(Pass(torch.tensor([prompt(4)]).expand(rows, -1), cache, first=True))
        held.append(cache.layers[0].buffers[0])  # type: ignore[attr-defined]
        runtime(Pass(torch.tensor([prompt(70)[:fed]]).expand(rows, -1), cache))
        lists.add(id(runtime.steps._list))
    assert runtime.steps.taken == 2 * 8
    assert len(lists) == 1
    addresses = {id(tensor) for tensor in held}
    del cache, held
    gc.collect()
    assert not [1 for found in gc.get_objects() if id(found) in addresses and isinstance(found, torch.Tensor)]
