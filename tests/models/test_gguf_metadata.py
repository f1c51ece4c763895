"""The metadata of GGUF files, as llama.cpp's converter writes them: each key is a field of the config, or an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from genctl.decode.runtime import Pass
from genctl.errors import ModelError
from genctl.models import gguf_config
from genctl.models.hub import LoadedModel, load
from genctl.native.runtime import NativeModel, NativeRuntime
from genctl.params import Runtime
from tests.models import converted
from tests.models.converted import CASES, written

library = pytest.importorskip("gguf")
IDS = torch.tensor([[5, 60, 250, 7, 9, 121, 30, 31, 44, 200, 100, 3, 8, 90, 91, 77, 12, 13]])
Metadata = dict[str, tuple[str, str, Any]]


def native(path: Path, **options: Any) -> LoadedModel:
    loaded = load(Runtime(model=str(path), **options))
    assert isinstance(loaded.model, NativeModel), loaded.runtime
    return loaded


def logits(path: Path, **options: Any) -> Tensor:
    model = native(path, **options).model
    assert isinstance(model, NativeModel)
    return NativeRuntime(model)(Pass(IDS)).logits


def wanted(name: str) -> Tensor:
    with torch.no_grad():
        found: Tensor = converted.model(name)(IDS).logits
    return found


def assert_close(found: Tensor, expected: Tensor, share: float = 1e-4) -> None:
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < share * expected.abs().max()


def put(key: str, value: Any, kind: str = "UINT32", items: str = "") -> Callable[[Metadata], object]:
    """One more key, or another value."""
    return lambda metadata: metadata.update({key: (kind, items, value)})


@pytest.mark.parametrize("name", CASES)
def test_a_converted_checkpoint_computes_what_it_did(name: str, tmp_path: Path) -> None:
    assert_close(logits(written(tmp_path / "tiny.gguf", name)), wanted(name))


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "mixtral", "falcon"])
@pytest.mark.parametrize(("kind", "share"), [("F16", 2e-4), ("BF16", 5e-3), ("Q8_0", 1e-2)])
def test_other_types_of_numbers_are_near(name: str, kind: str, share: float, tmp_path: Path) -> None:
    path, expected = written(tmp_path / "tiny.gguf", name, kind=kind), wanted(name)
    for dequantize in (False, True):
        left = logits(path, dequantize=dequantize).float() - expected
        assert left.abs().median() < share * expected.abs().max()  # a router may choose another expert


@pytest.mark.parametrize(
    "name", ["gemma2", "gemma3, linear rope", "llama, yarn", "phi3, longrope", "qwen3", "qwen3_moe", "qwen2_moe"]
)
def test_transformers_classes_have_the_same_config(name: str, tmp_path: Path) -> None:
    loaded: Any = load(Runtime(model=str(written(tmp_path / "tiny.gguf", name)), runtime="transformers")).model
    with torch.no_grad():
        assert_close(loaded(IDS).logits, wanted(name))


def test_falcons_with_groups_of_heads_are_not_read_by_transformers(tmp_path: Path) -> None:
    path = written(tmp_path / "tiny.gguf", "falcon, new")
    with pytest.raises(ModelError, match=r"tiny.gguf: transformers reads .* in another order"):
        load(Runtime(model=str(path), runtime="transformers"))


@pytest.mark.parametrize(("gate", "projection"), [(True, "gated-gelu"), (False, "relu")])
def test_a_t5_is_gated_where_it_has_gates(gate: bool, projection: str, tmp_path: Path) -> None:
    writer = library.GGUFWriter(tmp_path / "t5.gguf", "t5")
    writer.add_name("T5")
    sizes = {"context_length": 512, "block_count": 1, "decoder_block_count": 1, "embedding_length": 8}
    sizes |= {"feed_forward_length": 16, "attention.head_count": 2, "attention.key_length": 4, "vocab_size": 9}
    sizes |= {"attention.value_length": 4, "attention.relative_buckets_count": 32, "decoder_start_token_id": 0}
    for key, value in sizes.items():
        writer.add_uint32(f"t5.{key}", value)
    for key in ("layer_norm_epsilon", "layer_norm_rms_epsilon"):
        writer.add_float32(f"t5.attention.{key}", 1e-6)
    for name in ("token_embd", "enc.blk.0.ffn_up", "dec.blk.0.ffn_up", *(["enc.blk.0.ffn_gate"] if gate else [])):
        writer.add_tensor(f"{name}.weight", torch.zeros(16, 8).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config = gguf_config.inspect(tmp_path / "t5.gguf", need_tokenizer=False).config
    assert (config["feed_forward_proj"], "is_gated_act" in config) == (projection, False)
    data = (tmp_path / "t5.gguf").read_bytes()
    at = data.index(b"t5.attention.value_length") + len(b"t5.attention.value_length") + 4
    (tmp_path / "other.gguf").write_bytes(data[:at] + bytes([5]) + data[at + 1 :])
    with pytest.raises(ModelError, match=r"transformers does not read t5.attention.value_length = 5"):
        gguf_config.inspect(tmp_path / "other.gguf", need_tokenizer=False)


def test_an_architecture_that_transformers_lacks_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "tiny.gguf", "bloom")
    path.write_bytes(path.read_bytes().replace(b"bloom", b"blood"))
    with pytest.raises(ModelError, match=r"tiny.gguf cannot be used: .*architecture blood is not supported"):
        load(Runtime(model=str(path)))


# -- keys --------------------------------------------------------------------------------------------------------------

HARMLESS = (
    ("general.license", "STRING", "", "apache-2.0"),
    ("general.base_model.0.repo_url", "STRING", "", "https://example.org"),
    ("general.tags", "ARRAY", "STRING", ["text-generation"]),
    ("general.sampling.temp", "FLOAT32", "", 0.6),
    ("quantize.imatrix.file", "STRING", "", "imatrix.dat"),
    ("quantize.imatrix.entries_count", "INT32", "", 14),
    ("tokenizer.chat_template", "STRING", "", "{{ messages }}"),
    ("llama.tensor_data_layout", "STRING", "", "Meta AI original pth"),
    ("llama.rope.scaling.finetuned", "BOOL", "", True),
    ("llama.expert_count", "UINT32", "", 0),
    ("llama.attention.causal", "BOOL", "", True),
    ("llama.rope.scale_linear", "FLOAT32", "", 1.0),
)


def test_keys_that_change_nothing_are_listed(tmp_path: Path) -> None:
    def more(metadata: Metadata) -> None:
        metadata.update({key: (kind, items, value) for key, kind, items, value in HARMLESS})

    assert_close(logits(written(tmp_path / "tiny.gguf", "llama", change=more)), wanted("llama"))


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("llama", put("llama.attention.temperature_scale", 0.1, "FLOAT32"), "llama.attention.temperature_scale = 0.1"),
        ("llama", put("llama.attention.sliding_window", 8), "llama.attention.sliding_window = 8 is not known"),
        ("llama", put("llama.attention.value_length", 16), "llama.attention.value_length is 16; known here is 8"),
        ("llama", put("llama.rope.scaling.factor", float("inf"), "FLOAT32"), "factor is inf; known here is a number"),
        ("llama", put("llama.rope.dimension_count", 4_000_000_000), "count is 4000000000; known here is 8"),
        ("llama", put("llama.rope.dimension_count", 4), "llama.rope.dimension_count is 4; known here is 8"),
        ("llama", put("llama.attention.causal", False, "BOOL"), "llama.attention.causal is False; known here is True"),
        ("llama", put("llama.rope.scaling.type", "ntk", "STRING"), "llama.rope.scaling.type is 'ntk'; known here is"),
        ("llama", put("llama.rope.scaling.type", "longrope", "STRING"), "as longrope, without 4 factors for them"),
        ("llama", put("llama.rope.freq_base_swa", 5.0, "FLOAT32"), "llama.rope.freq_base_swa is 5.0; known here is"),
        ("llama", put("llama.expert_used_count", 2), "llama.expert_used_count is 2; known here is 0"),
        ("llama", put("llama.attention.head_count", [4, 2], "ARRAY", "UINT32"), "head_count is [4, 2]; known here is"),
        ("qwen2", put("qwen2.rope.dimension_sections", [1, 1, 2, 0], "ARRAY", "INT32"), "dimension_sections = [1, 1,"),
        ("qwen3_moe", put("qwen3moe.expert_gating_func", 2), "qwen3moe.expert_gating_func is 2; known here is 1"),
        ("qwen3_moe", put("qwen3moe.expert_shared_count", 1), "qwen3moe.expert_shared_count = 1 is not known"),
        ("gemma3", put("gemma3.attention.sliding_window_pattern", [True], "ARRAY", "BOOL"), "known here is a list"),
        ("granite", put("granite.rope.scaling.finetuned", False, "BOOL"), "finetuned is False; known here is True"),
        ("olmo", put("olmo.attention.layer_norm_epsilon", 0.1, "FLOAT32"), "layer_norm_epsilon is 0.1"),
        ("bloom", put("bloom.feed_forward_length", 64), "bloom.feed_forward_length is 64; known here is 128"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_refused_by_name(
    name: str, change: Callable[[Metadata], object], said: str, tmp_path: Path
) -> None:
    path = written(tmp_path / "tiny.gguf", name, change=change)
    with pytest.raises(ModelError) as error:
        load(Runtime(model=str(path)))
    assert error.value.message.startswith("tiny.gguf")
    assert said in error.value.message


def test_what_no_key_says_is_what_llama_cpp_takes(tmp_path: Path) -> None:
    def fewer(metadata: Metadata) -> None:
        for key in ("attention.key_length", "attention.value_length", "rope.dimension_count", "vocab_size"):
            del metadata[f"llama.{key}"]
        del metadata["llama.rope.freq_base"]  # 10,000

    assert_close(logits(written(tmp_path / "tiny.gguf", "llama", change=fewer)), wanted("llama"))


@pytest.mark.parametrize("pattern", [(6, "UINT32", ""), ([True] * 5 + [False, True], "ARRAY", "BOOL")])
def test_the_layers_with_a_window_are_those_of_the_pattern(pattern: tuple[Any, str, str], tmp_path: Path) -> None:
    key = "gemma3.attention.sliding_window_pattern"
    path = written(tmp_path / "tiny.gguf", "gemma3", change=put(key, *pattern))
    assert_close(logits(path), wanted("gemma3"))
    other = written(tmp_path / "other.gguf", "gemma3", change=put(key, 2))
    spec = native(other).model.spec  # type: ignore[union-attr]
    assert [window is None for window in spec.windows] == [False, True] * 3 + [False]
    none = written(tmp_path / "none.gguf", "gemma3", change=put("gemma3.attention.sliding_window", 0))
    assert set(native(none).model.spec.windows) == {None}  # type: ignore[union-attr]


def test_a_list_of_equal_values_is_one_value(tmp_path: Path) -> None:
    def lists(metadata: Metadata) -> None:
        for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
            metadata[f"llama.{key}"] = ("ARRAY", "UINT32", [metadata[f"llama.{key}"][2]] * 2)

    assert_close(logits(written(tmp_path / "tiny.gguf", "llama", change=lists)), wanted("llama"))


def test_yarn_has_the_fields_of_config_json(tmp_path: Path) -> None:
    def yarn(metadata: Metadata) -> None:
        for key, value in (("attn_factor", 1.5), ("yarn_beta_fast", 16.0), ("yarn_beta_slow", 2.0)):
            metadata[f"qwen2.rope.scaling.{key}"] = ("FLOAT32", "", value)

    checkpoint = gguf_config.inspect(written(tmp_path / "tiny.gguf", "qwen2, yarn", change=yarn), need_tokenizer=False)
    sharp = 1 + 0.1 * torch.tensor(4.0).log().item()  # section 3.4 of the paper
    assert checkpoint.config["max_position_embeddings"] == 256
    assert checkpoint.config["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "attention_factor": pytest.approx(1.5 * sharp),
    }


def test_queries_keys_and_values_may_be_one_matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the converter writes them with --fuse-qkv."""
    apart = converted.tensors

    def joined(name: str) -> Any:
        held: dict[str, list[Tensor]] = {}
        for tensor, values in apart(name):
            for part in ("attn_q.", "attn_k.", "attn_v."):
                tensor = tensor.replace(part, "attn_qkv.")
            held.setdefault(tensor, []).append(values)
        order = {16: 1, 32: 0}  # keys and values have 16 rows, in this order
        for tensor, parts in held.items():
            yield tensor, torch.cat(sorted(parts, key=lambda part: order.get(len(part), 0)))

    monkeypatch.setattr(converted, "tensors", joined)
    for name in ("llama, biases", "qwen2"):
        assert_close(logits(written(tmp_path / "tiny.gguf", name)), wanted(name))


# -- files in several parts --------------------------------------------------------------------------------------------


def split(folder: Path, count: int = 3) -> list[Path]:
    """A Llama in so many parts, as `llama-gguf-split` and the converter make them."""
    whole = library.GGUFReader(written(folder / "whole.gguf", "llama", kind="Q8_0"))
    tensors, paths = whole.tensors, []
    for number in range(count):
        paths.append(folder / f"tiny-{number + 1:05}-of-{count:05}.gguf")
        writer = library.GGUFWriter(paths[-1], "llama")
        if number:
            writer.kv_data[0].clear()  # the first part alone has the metadata
        else:
            for key, kind, items, value in converted.metadata("llama")[1:]:
                types = (library.GGUFValueType[kind], library.GGUFValueType[items] if items else None)
                writer.add_key_value(key, value, *types)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(tensors))
        for tensor in tensors[number::count]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths


def test_a_file_in_parts_is_read_from_the_first(tmp_path: Path) -> None:
    first, *others = split(tmp_path)
    assert torch.equal(logits(first), logits(tmp_path / "whole.gguf"))
    assert set(native(first).checkpoint.files) == {path.name for path in (first, *others)}  # type: ignore[union-attr]
    with pytest.raises(ModelError, match=r"00002-of-00003.gguf is one of 3 parts: give the first part"):
        load(Runtime(model=str(others[0])))
    others[1].unlink()
    with pytest.raises(ModelError, match=r"cannot read tiny-00003-of-00003.gguf: "):
        load(Runtime(model=str(first)))
