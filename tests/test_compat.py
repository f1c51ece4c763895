"""Every unlisted name of torch and transformers is where `genctl.compat` looks for it, and what happens if not."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

from genctl import compat
from genctl.errors import ModelError
from tests.tiny import tiny
from tests.versions import CACHE, NEWEST, OLDER


@pytest.mark.parametrize("scale", [None, 0.3])
def test_attention_with_sums(scale: float | None) -> None:
    query, keys, values = (torch.randn(2, 3, columns, 16) for columns in (4, 70, 70))
    output, sums = compat.attention_with_sums(query, keys, values, scale)
    scores = query @ keys.transpose(-1, -2) * (0.25 if scale is None else scale)
    torch.testing.assert_close(output, scores.softmax(-1) @ values)
    torch.testing.assert_close(sums, scores.logsumexp(-1))


def test_names_of_dynamo(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = torch._dynamo.config
    assert hasattr(settings, "recompile_limit"), "torch._dynamo.config.recompile_limit has moved"
    with settings.patch(recompile_limit=8):
        compat.raise_recompile_limit(64)
        assert settings.recompile_limit == 64
        compat.raise_recompile_limit(32)
        assert settings.recompile_limit == 64
    assert hasattr(torch._dynamo, "maybe_mark_dynamic"), "torch._dynamo.maybe_mark_dynamic has moved"
    tensor = torch.zeros(2, 3)
    assert not compat.is_marked_dynamic(tensor)
    compat.mark_dynamic(tensor, (0, 1))
    assert compat.is_marked_dynamic(tensor), "Tensor._dynamo_weak_dynamic_indices has moved"
    assert hasattr(torch._dynamo, "mark_static_address"), "torch._dynamo.mark_static_address has moved"
    marked: list[Tensor] = []
    monkeypatch.setattr(torch._dynamo, "mark_static_address", marked.append)
    compat.mark_static_address(torch.zeros(2))
    assert len(marked) == 1


def test_hooks() -> None:
    module = nn.Linear(2, 2)
    assert not compat.has_hooks(module), "Module._forward_hooks or Module._forward_pre_hooks has moved"
    for register in (module.register_forward_hook, module.register_forward_pre_hook):
        handle = register(lambda *args: None)
        assert compat.has_hooks(module)
        handle.remove()
    assert not compat.has_hooks(module)
    replaced = nn.Linear(2, 2)
    replaced.forward = lambda x: x  # type: ignore[method-assign]
    assert compat.has_hooks(replaced)
    from accelerate.hooks import ModelHook, add_hook_to_module

    module = nn.Linear(2, 2)
    add_hook_to_module(module, ModelHook())
    assert hasattr(module, "_hf_hook"), "accelerate's _hf_hook has moved"
    assert compat.has_hooks(module)
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert compat.forward_hooks(model) == 0
    model[0].register_forward_hook(lambda *args: None)
    model.register_forward_pre_hook(lambda *args: None)
    assert compat.forward_hooks(model) == 2


def test_names_of_models_and_configs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("gpt2")
    assert hasattr(model, "_supports_default_dynamic_cache"), "_supports_default_dynamic_cache has moved"
    assert compat.takes_dynamic_cache(model)
    monkeypatch.setattr(model, "_supports_default_dynamic_cache", lambda: False)
    assert not compat.takes_dynamic_cache(model)
    assert compat.takes_dynamic_cache(object())
    from transformers import MambaPreTrainedModel, PreTrainedModel

    assert hasattr(PreTrainedModel, "_is_stateful"), "PreTrainedModel._is_stateful has moved"
    assert compat.is_stateful(MambaPreTrainedModel)
    assert not compat.is_stateful(tiny("gpt2"))
    assert not compat.is_stateful(object())
    config = tiny("gpt2").config
    assert hasattr(config, "_attn_implementation"), "PreTrainedConfig._attn_implementation has moved"
    assert compat.attention_of(config) == "sdpa"
    monkeypatch.setattr(config, "_attn_implementation", "eager")
    assert compat.attention_of(config) == "eager"
    assert compat.attention_of(object()) == ""
    model = tiny("gpt2")
    assert hasattr(model, "_get_dtype_plan"), "PreTrainedModel._get_dtype_plan has moved"
    assert compat.kept_dtypes(model, torch.float16) == {}
    monkeypatch.setattr(model, "_keep_in_fp32_modules", {"wo"})  # T5's
    assert compat.kept_dtypes(model, torch.float16) == {"wo": torch.float32}


def test_synthid_keys() -> None:
    from transformers import SynthIDTextWatermarkLogitsProcessor as Watermark

    assert hasattr(Watermark, "_compute_keys"), "SynthIDTextWatermarkLogitsProcessor._compute_keys has moved"
    processor = Watermark(3, [5, 7], 16, 0, 4, torch.device("cpu"))
    keys, hashes = compat.synthid_keys(processor, torch.tensor([[1, 2]]), torch.tensor([[0, 1, 2, 3]]))
    assert (keys.shape, hashes.shape) == ((1, 4, 2), (1,))


def test_another_version_than_a_tested_one_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    from genctl.models.hub import load
    from genctl.params import Runtime

    scripts = Path(__file__).parent.parent / "scripts"
    (torch_tested,) = compat.TESTED_TORCH
    oldest, *_, newest = compat.TESTED_TRANSFORMERS
    pinned = scripts.joinpath("constraints.txt").read_text("utf-8")
    assert f"\ntorch=={torch_tested}." in pinned
    assert f"\ntransformers=={newest}." in pinned
    assert f"\ntransformers=={oldest}." in scripts.joinpath("constraints-oldest.txt").read_text("utf-8")
    loaded = load(Runtime(model="builtin:stories"))
    for torch_version, transformers_version, notes in (
        (f"{torch_tested}.9+cpu", f"{newest}.7", []),
        ("2.99.1+cu132", f"{oldest}.0", [f"torch 2.99.1: genctl is tested with torch {torch_tested}"]),
        (
            f"{torch_tested}.0",
            "5.20.0.dev0",
            [f"transformers 5.20.0.dev0: genctl is tested with transformers {oldest} and {newest}"],
        ),
    ):
        monkeypatch.setattr(torch, "__version__", torch_version)
        monkeypatch.setattr(compat, "version", {"transformers": transformers_version}.__getitem__)
        assert [line for line in loaded.verbose_notes if "genctl is tested with" in line] == notes


def test_what_an_older_transformers_cannot_do_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from transformers import GptOssConfig
    from transformers.models.auto import configuration_auto

    from genctl.models import check, with_transformers

    monkeypatch.setattr(compat, "version", {"transformers": "5.17.1"}.__getitem__)
    monkeypatch.delitem(configuration_auto.CONFIG_MAPPING_NAMES, "opt")
    tiny("opt", tmp_path)
    found = check.inspect(tmp_path, allow_pickle=False, trust_remote_code=False, need_tokenizer=False)
    with pytest.raises(
        ModelError, match=rf"the architecture 'opt' needs transformers {NEWEST}; 5\.17\.1 is installed"
    ) as info:
        with_transformers.read_config(found, trust_remote_code=False)
    assert info.value.hint == f'pip install "transformers>={NEWEST}"'
    config = GptOssConfig(swiglu_limit=0.3)
    if hasattr(GptOssConfig, "swiglu_limit"):  # only the newest version reads it
        compat.correct_config("gpt_oss", config)
        monkeypatch.delattr(GptOssConfig, "swiglu_limit")
    with pytest.raises(ModelError, match=rf"swiglu_limit = 0\.3 needs transformers {NEWEST}"):
        compat.correct_config("gpt_oss", config)


def test_soft_caps_are_not_left_to_an_sdpa_without_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from genctl.models.hub import load
    from genctl.params import Runtime

    tiny("gemma2", tmp_path)
    assert load(Runtime(model=str(tmp_path), runtime="transformers")).model.config._attn_implementation == "eager"
    monkeypatch.setattr(compat, "version", {"transformers": "5.17.0"}.__getitem__)
    assert compat.attention_for(tiny("gemma2").config) == {"attn_implementation": "eager"}
    assert compat.attention_for(tiny("llama").config) == {}


def new(input_ids: Any, cache: Any = None, **kwargs: Any) -> None: ...
def old(input_ids: Any, past_key_values: Any = None, **kwargs: Any) -> None: ...
def mamba(input_ids: Any, cache_params: Any = None, **kwargs: Any) -> None: ...
def passing(*args: Any, **kwargs: Any) -> None: ...


@pytest.mark.parametrize(
    ("method", "inherited", "name"),
    [
        (new, new, "cache"),
        (passing, new, "cache"),
        (old, new, "past_key_values"),  # code of a checkpoint, written for an older version
        (old, old, "past_key_values"),
        (mamba, old, "cache_params"),
        (passing, old, "past_key_values"),
        (new, old, "past_key_values"),  # XLM's `cache` was something else
    ],
)
def test_the_cache_goes_in_by_the_name_of_the_signature(method: Any, inherited: Any, name: str) -> None:
    assert compat.cache_argument(method, inherited) == name


def test_every_architecture_takes_its_cache_by_a_name_that_it_has() -> None:
    """None swallows it in `**kwargs`, which nobody reads."""
    import transformers
    from transformers import GenerationMixin

    from genctl.models.architectures import ROWS, facts_of
    from tests.zoo import recipes

    inherited = GenerationMixin.prepare_inputs_for_generation
    listed = {row.name for row in ROWS if row.compared}
    for table in recipes.TABLES.values():
        for kind in listed & {*table}:
            names = table[kind]
            model = getattr(transformers, names if isinstance(names, str) else names[0])
            parameters = inspect.signature(model.forward).parameters
            assert compat.cache_argument(model.forward, inherited) in parameters, kind
            if facts_of(kind).returns:
                prepare = model.prepare_inputs_for_generation
                assert compat.states_argument(prepare, facts_of(kind).returns) in ("past_key_values", "mems")


def test_the_cache_that_comes_back_is_found_under_its_name_and_layers_that_keep_nothing() -> None:
    from transformers.modeling_outputs import CausalLMOutputWithPast

    assert compat.returned_cache(CausalLMOutputWithPast()) is None
    held = object()
    assert compat.returned_cache(CausalLMOutputWithPast(**{CACHE: held})) is held
    from transformers import cache_utils

    names = [kind.__name__ for kind in compat.layers_that_keep_nothing(cache_utils)]
    assert names == ([] if OLDER else ["DummyLayer"]), "it has moved"
    assert compat.layers_that_keep_nothing(object()) == ()
