"""Steps that run from a record give what the model gives, and are left to it where they might not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from genctl import events
from genctl.decode import recorded
from genctl.decode.forward import Forward
from genctl.decode.loop import decode
from genctl.decode.types import Lane
from genctl.models.packing import pack
from genctl.strategies.beam import Beam
from genctl.strategies.sample import Sample
from tests.tiny import ARCHITECTURES, HIDDEN, INNER, SEQ2SEQ, VOCABULARY, tiny

FOLLOWED = ("gpt2", "gpt_neox", "llama", "mistral", "qwen2", "qwen3", "gemma3", "opt", "phi", "t5", "bart", "marian")
PROMPT = tuple(torch.randint(5, 300, (90,), generator=torch.Generator().manual_seed(4)).tolist())
LONG = 30


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short texts are recorded too."""
    monkeypatch.setattr(recorded, "SURE", 0)


def model(arch: str) -> Any:
    return copy.deepcopy(tiny(arch, seed=7)).requires_grad_(False)  # the other tests have theirs


def lane(arch: str, prompt: tuple[int, ...], strategy: Any = None, name: str = "0", new: int = LONG) -> Lane:
    strategy = strategy or Sample()
    source = prompt if arch in SEQ2SEQ else None
    tokens = (2,) if arch in SEQ2SEQ else prompt
    return Lane(name, tokens, strategy, new, seed=3, returned=getattr(strategy, "n", 1), source=source)


def run(forward: Forward, lanes: list[Lane], width: int = 1) -> dict[str, Any]:
    told = list(decode(forward, lanes, width=width))
    assert not [event for event in told if isinstance(event, events.Failed)]
    return {
        event.lane: [(one.tokens, pytest.approx(one.logprob, abs=1e-3)) for one in event.hypotheses]
        for event in told
        if isinstance(event, events.Finished)
    }


def recorder(forward: Forward) -> recorded.Recorder:
    assert forward.recorder is not None
    return forward.recorder


def failures(forward: Forward) -> list[str]:
    return [record.failed for record in recorder(forward).records.values() if record.failed]


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("arch", FOLLOWED)
def test_a_recorded_text_is_the_models_own(arch: str, packed: bool) -> None:
    one = model(arch)
    if packed:
        pack(one, smallest=1)
    forward = Forward(one)
    lanes = [
        lane(arch, PROMPT[:7], name="greedy"),
        lane(arch, PROMPT[:12], Sample(True, 3), name="samples"),
        lane(arch, PROMPT, Beam(3), name="beams"),
        lane(arch, PROMPT[:9], name="short", new=5),
    ]
    for width in (1, 4):
        assert run(forward, lanes, width) == run(Forward(one, record=False), lanes, width)
    assert recorder(forward).steps > 60
    assert failures(forward) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("arch", ["llama", "t5"])
def test_so_it_is_in_16_bits(arch: str, dtype: torch.dtype) -> None:
    one = model(arch).to(dtype)
    pack(one, smallest=1)
    forward = Forward(one)
    assert run(forward, [lane(arch, PROMPT[:7])]) == run(Forward(one, record=False), [lane(arch, PROMPT[:7])])
    assert recorder(forward).steps
    assert failures(forward) == []


def test_so_it_is_in_8_bits_with_few_rows_and_with_many() -> None:
    one = model("llama")
    pack(one, quantize="int8", smallest=1)
    forward = Forward(one)
    for rows in (1, 3, 14):
        lanes = [lane("llama", PROMPT[:7], Sample(True, rows))]
        assert run(forward, lanes) == run(Forward(one, record=False), lanes)
    assert recorder(forward).steps
    assert failures(forward) == []


SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": INNER, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
DOUBLE = {
    "vocab_size": VOCABULARY, "d_model": HIDDEN, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": INNER,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_ffn_dim": INNER, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
MT5 = {
    "vocab_size": VOCABULARY, "d_model": HIDDEN, "d_kv": 8, "d_ff": INNER, "num_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0,
}  # fmt: skip
OTHERS = {
    "gemma": {**SMALL, "head_dim": 8}, "granite": SMALL, "olmo": SMALL, "olmo2": SMALL, 
    "stablelm": SMALL, "starcoder2": SMALL, "mbart": DOUBLE, "pegasus": DOUBLE, "mt5": MT5,
}  # fmt: skip


def test_every_architecture_that_is_recorded_is_tested() -> None:
    zoo = {model(arch).config.model_type for arch in FOLLOWED}
    assert zoo | set(OTHERS) == recorded.KNOWN


@pytest.mark.parametrize("kind", OTHERS)
def test_architectures_beside_the_usual_ones(kind: str) -> None:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **OTHERS[kind])
    double = config.is_encoder_decoder
    one = (transformers.AutoModelForSeq2SeqLM if double else transformers.AutoModelForCausalLM).from_config(config)
    one.eval().requires_grad_(False)
    for name, weight in one.named_parameters():
        if weight.ndim == 2 and "embed" not in name:
            weight *= 4  # or all scores are about the same
    arch = "t5" if double else "llama"
    lanes = [lane(arch, PROMPT[:7], name="0"), lane(arch, PROMPT[:12], name="1"), lane(arch, PROMPT, Beam(2), name="2")]
    forward = Forward(one)
    assert run(forward, lanes, 3) == run(Forward(one, record=False), lanes, 3)
    assert recorder(forward).steps
    assert failures(forward) == []


@pytest.mark.parametrize("arch", [arch for arch in ARCHITECTURES if arch not in FOLLOWED])
def test_other_architectures_are_left_alone(arch: str) -> None:
    assert Forward(model(arch)).recorder is None


def test_angles_that_depend_on_the_length_are_left_alone() -> None:
    one = model("llama")
    one.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    assert Forward(one).recorder is None


def test_a_model_that_learns_is_left_alone() -> None:
    assert Forward(tiny("gpt2")).recorder is None


def test_who_watches_a_module_sees_every_step() -> None:
    one = model("llama")
    forward = Forward(one)
    run(forward, [lane("llama", PROMPT[:7])])
    assert recorder(forward).steps
    calls: list[Tensor] = []
    handle = one.model.layers[0].register_forward_hook(lambda module, given, made: calls.append(made))
    run(forward, [lane("llama", PROMPT[:7], new=12)])
    assert len(calls) == 12  # the prompt, and eleven steps
    handle.remove()
    before = recorder(forward).steps
    run(forward, [lane("llama", PROMPT[:7], new=12)])
    assert recorder(forward).steps == before + 11
    assert len(calls) == 12


def test_modules_from_elsewhere_are_not_recorded() -> None:
    class Adapter(torch.nn.Linear):
        """May be switched off at any time."""

    one = model("llama")
    forward = Forward(one)
    run(forward, [lane("llama", PROMPT[:7])])
    before = recorder(forward).steps
    assert before
    one.lm_head.__class__ = Adapter
    run(forward, [lane("llama", PROMPT[:7])])
    assert recorder(forward).steps == before


def test_a_model_that_takes_another_way_later_is_given_up() -> None:
    one = model("llama")
    steps = 0

    class Changing(torch.nn.Linear):
        def forward(self, hidden: Tensor) -> Tensor:
            nonlocal steps
            steps += 1
            return super().forward(hidden) + (0.0 if steps < 4 else torch.arange(VOCABULARY) / 20)

    Changing.__module__ = "torch.nn"  # what is from elsewhere is not recorded
    one.lm_head.__class__ = Changing
    forward = Forward(one)
    run(forward, [lane("llama", PROMPT[:7], new=60)])
    assert steps > 40  # the model took them all from there on
    assert failures(forward) == ["it gave other numbers"]


def test_a_number_bound_to_the_length_is_found_in_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    one = model("llama")
    plain = type(one.model).forward

    def counted(self: Any, *given: Any, **named: Any) -> Any:
        named["position_ids"] = torch.full((1, 1), int(named["position_ids"][0, -1]))
        return plain(self, *given, **named)

    monkeypatch.setattr(type(one.model), "forward", counted)
    wanted = run(Forward(one, record=False), [lane("llama", PROMPT[:1])])
    forward = Forward(one)
    assert run(forward, [lane("llama", PROMPT[:1])]) == wanted
    assert failures(forward) == ["it gave other numbers"]


def test_where_nothing_can_be_recorded_the_model_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no tracer here\nreally")

    one = model("t5")
    wanted = run(Forward(one, record=False), [lane("t5", PROMPT[:7])])
    monkeypatch.setattr(torch.jit, "trace", broken)
    forward = Forward(one)
    assert run(forward, [lane("t5", PROMPT[:7])]) == wanted
    assert failures(forward) == ["RuntimeError: no tracer here"]


def test_a_record_is_made_where_it_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "SURE", 50)
    forward = Forward(model("gpt2"))
    run(forward, [lane("gpt2", PROMPT[:7], new=20)])
    assert recorder(forward).made == 0
    run(forward, [lane("gpt2", PROMPT[:7], new=60)])  # at once
    assert recorder(forward).made == 1
    forward = Forward(model("gpt2"))
    for _ in range(3):  # 19 steps each, of which the 49th has too few after it
        run(forward, [lane("gpt2", PROMPT[:7], new=20)])
    assert recorder(forward).made == 0
    run(forward, [lane("gpt2", PROMPT[:7], new=20)])
    assert recorder(forward).made == 1


def test_buffers_that_grow_and_rows_that_leave_do_not_matter() -> None:
    one = model("gpt2")
    lanes = [lane("gpt2", PROMPT[: 5 + 20 * n], name=str(n), new=20 + 40 * n) for n in range(4)]
    forward = Forward(one)
    assert run(forward, lanes, 4) == run(Forward(one, record=False), lanes, 4)
    assert failures(forward) == []


def test_nothing_is_left_behind_in_the_model() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    one = model("llama")
    pack(one, smallest=1)
    before = dict(ALL_ATTENTION_FUNCTIONS._local_mapping)
    run(Forward(one), [lane("llama", PROMPT[:7])])
    assert dict(ALL_ATTENTION_FUNCTIONS._local_mapping) == before
    assert not any("forward" in module.__dict__ for module in one.modules())
