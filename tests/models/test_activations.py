"""Written-out activations give way to cheaper ones that compute the same, and nothing else does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.bloom.modeling_bloom import BloomGelu

from genctl.models.activations import TanhGelu, fuse
from genctl.models.hub import load
from genctl.params import Runtime
from tests.tiny import checkpoint

GIVEN = torch.cat([torch.linspace(-12, 12, 4001), torch.tensor([0.0, -0.0, 1e-8, 88.0, -88.0, 3e4])])


@pytest.mark.parametrize("kind", ["gelu_new", "gelu_fast", "bloom"])
def test_the_fused_one_computes_the_same(kind: str) -> None:
    module = BloomGelu() if kind == "bloom" else ACT2FN[kind]
    model = nn.Sequential(module).eval()
    wanted = model(GIVEN)
    assert fuse(model) == 1
    assert type(model[0]) is TanhGelu
    torch.testing.assert_close(model(GIVEN), wanted, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 3])
def test_one_token_and_many_are_told_apart_by_nothing_but_time(dtype: torch.dtype, tokens: int) -> None:
    given = GIVEN.to(dtype).expand(2, tokens, -1)
    kept = given.clone()
    wanted = nn.functional.gelu(given, approximate="tanh")
    torch.testing.assert_close(TanhGelu()(given), wanted, rtol=2e-6, atol=2e-6)
    assert torch.equal(given, kept)


def test_what_is_no_number_stays_none() -> None:
    found = TanhGelu()(torch.tensor([[float("nan"), float("inf"), -1e30]] * 2))
    assert found[:, 0].isnan().all()
    assert found[:, 1:].tolist() == [[float("inf"), 0.0]] * 2


def test_others_and_hooked_ones_stay() -> None:
    hooked = ACT2FN["gelu_new"]
    hooked.register_forward_hook(lambda module, given, made: made + 1)
    model = nn.Sequential(hooked, ACT2FN["gelu"], ACT2FN["quick_gelu"], nn.ReLU())
    kinds = [type(module) for module in model]
    assert fuse(model) == 0
    assert [type(module) for module in model] == kinds


@pytest.mark.parametrize(("arch", "many"), [("gpt2", 2), ("bloom", 2), ("llama", 0)])
def test_a_loaded_model_has_them_unless_told_not_to(arch: str, many: int, tmp_path: Path) -> None:
    folder = str(checkpoint(arch, tmp_path))
    fused, plain = (load(Runtime(model=folder, pack=pack, runtime="transformers")).model for pack in (True, False))
    assert sum(type(module) is TanhGelu for module in fused.modules()) == many
    assert not any(type(module) is TanhGelu for module in plain.modules())
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(fused(ids).logits, plain(ids).logits, rtol=0.0, atol=1e-5)
