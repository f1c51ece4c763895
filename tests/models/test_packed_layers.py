"""Packed layers compute what plain ones do, in every architecture, 8-bit ones nearly; what was read is not kept."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from genctl.errors import ModelError, UsageError
from genctl.kernels.ops import library
from genctl.models import packed_layers
from genctl.models.hub import LoadedModel, load
from genctl.native import linear
from genctl.native.linear import CompiledProduct
from genctl.params import Runtime
from genctl.transformers.runtime import TransformersRuntime
from tests.tiny import ARCHITECTURES, PAD, checkpoint, save, tiny

pytestmark = pytest.mark.skipif(library() is None, reason="the products are not compiled here")
PROMPTS = torch.tensor([[11, 48, 205, 93, 160], [5, 60, 250, 7, 31], [299, 3, 150, 9, 9]])


def loaded(folder: Path, **options: Any) -> LoadedModel:
    return load(Runtime(model=str(folder), **{"runtime": "transformers", **options}))


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    given = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=ids, **given).logits
    return found


def greedy(model: Any, ids: torch.Tensor) -> list[list[int]]:
    made: list[list[int]] = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, pad_token_id=PAD
    ).tolist()
    return made


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_architecture_computes_the_same_packed(arch: str, tmp_path: Path) -> None:
    plain = tiny(arch)
    model = loaded(checkpoint(arch, tmp_path), pack=False).model
    report = packed_layers.pack(model, smallest=0)
    assert report.packed >= (1 if arch == "mamba" else 2) * plain.config.get_text_config(decoder=True).num_hidden_layers
    for ids in (PROMPTS[:1], PROMPTS, PROMPTS.repeat(6, 3), PROMPTS[:, :1]):
        torch.testing.assert_close(logits(model, ids), logits(plain, ids), rtol=0.0, atol=1e-4)
    for ids in (PROMPTS[:1], PROMPTS):
        assert greedy(model, ids) == greedy(plain, ids)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_architecture_computes_nearly_the_same_in_int8(arch: str, tmp_path: Path) -> None:
    """The tiny models' logits spread by about 4: a layer with the wrong scale or order breaks this."""
    plain = tiny(arch)
    model = loaded(checkpoint(arch, tmp_path), pack=False).model
    assert packed_layers.pack(model, smallest=0, quantize="int8").packed
    for ids in (PROMPTS[:1], PROMPTS.repeat(6, 3)):
        wanted, found = logits(plain, ids).flatten(), logits(model, ids).flatten()
        assert torch.corrcoef(torch.stack([wanted, found]))[0, 1] > 0.99


def in_a_model(layer: nn.Module, quantize: str | None = None) -> packed_layers.PackedLinear:
    """What a layer becomes in a model."""
    model = nn.Sequential(layer)
    assert packed_layers.pack(model, smallest=0, quantize=quantize).packed == 1
    packed = model[0]
    assert isinstance(packed, packed_layers.PackedLinear)
    return packed


@pytest.mark.parametrize("kind", ["linear", "conv1d"])
@pytest.mark.parametrize(
    ("dtype", "quantize"),
    [(torch.float32, None), (torch.float32, "int8"), (torch.float16, None), (torch.bfloat16, None)],
)
def test_a_packed_layer_takes_every_shape_that_a_plain_one_takes(
    kind: str, dtype: torch.dtype, quantize: str | None
) -> None:
    """Short ones sum in float32."""
    torch.manual_seed(0)
    layer: Any = nn.Linear(64, 40) if kind == "linear" else Conv1D(40, 64)
    nn.init.normal_(layer.weight, std=0.125)
    nn.init.normal_(layer.bias)
    layer = layer.to(dtype)
    given = torch.randn(3, 7, 64).to(dtype)
    weight = (layer.weight.detach() if kind == "linear" else layer.weight.detach().t()).clone()
    is_short = dtype != torch.float32
    near = {"rtol": 2 * torch.finfo(dtype).eps if is_short else 0.0, "atol": 1e-5 if quantize is None else 0.06}
    with torch.no_grad():
        packed = in_a_model(layer, quantize=quantize)
        for x in (given, given[:, -1:], given.transpose(0, 1), given[0, 0], given[:, ::2], given[:0], given[:1, :1]):
            wanted = functional.linear(x.float(), weight.float(), layer.bias.float())
            torch.testing.assert_close(packed(x), wanted.to(dtype), **near)  # the type, too
    if is_short:
        assert isinstance(packed.product, CompiledProduct)
        assert packed_layers.weights_bytes(packed) == 2 * 64 * 40 + 2 * 40


@pytest.mark.parametrize(("arch", "left"), [("mamba", {"dt_proj", "x_proj", "out_proj", "lm_head"}), ("t5", {"wo"})])
def test_layers_whose_weights_the_model_reads_itself_stay(arch: str, left: set[str], tmp_path: Path) -> None:
    """Mamba computes `dt_proj.weight @ x`; T5 looks at the dtype of `wo.weight`."""
    model = loaded(checkpoint(arch, tmp_path), pack=False).model
    report = packed_layers.pack(model, smallest=0)
    plain = {name.rpartition(".")[2] for name, module in model.named_modules() if type(module) is nn.Linear}
    assert plain == left
    assert set(report.left) == {"whose weights the model reads by itself"}


class _Aliased(nn.Module):
    """Reads a weight in a way that is not found in the text of its file."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layer = self.projection
        return x @ layer.weight.t()


def test_a_weight_that_is_read_unforeseen_is_an_error_that_says_what_helps() -> None:
    model = _Aliased()
    assert packed_layers.pack(model, smallest=1).packed == 1
    assert not hasattr(model.projection, "weight")
    with pytest.raises(ModelError, match="reads the weight of a linear layer that was packed") as raised:
        model(torch.ones(2, 8))
    assert "--no-pack" in raised.value.hint


class Adapter(nn.Linear):
    """Does more than its weight says."""

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return super().forward(given) + 1


def test_what_is_not_fit_stays_as_it_is() -> None:
    hooked = nn.Linear(32, 32)
    hooked.register_forward_hook(lambda module, given, made: made + 1)
    mixed = nn.Linear(32, 32)
    mixed.bias = nn.Parameter(torch.zeros(32, dtype=torch.bfloat16))
    model = nn.ModuleDict(
        {
            "adapter": Adapter(32, 32),
            "attention": nn.MultiheadAttention(32, 2),
            "doubled": nn.Linear(32, 32, dtype=torch.float64),
            "hooked": hooked,
            "meta": nn.Linear(32, 32, device="meta"),
            "mixed": mixed,
            "small": nn.Linear(4, 4),
            "fit": nn.Linear(32, 32),
            "embedding": nn.Embedding(32, 32),
        }
    )
    kinds = {name: type(module) for name, module in model.items()}
    report = packed_layers.pack(model, smallest=64)
    assert report.packed == 1
    assert report.left == {
        "of another class": 2,  # the adapter, and what is inside MultiheadAttention
        "with hooks": 1,
        "not plain tensors on the CPU": 1,
        "of mixed types": 1,
        "small": 1,
        "float64 without a compiled product": 1,
    }
    assert [name for name, module in model.items() if type(module) is not kinds[name]] == ["fit"]
    assert type(model["fit"]) is packed_layers.PackedLinear
    again = packed_layers.pack(model, smallest=64)
    assert again.packed == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_where_nothing_is_compiled_layers_stay_and_8_bits_are_exact(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, layer = torch.randn(3, 512), nn.Linear(512, 512)
    with torch.no_grad():
        wanted = in_a_model(copy.deepcopy(layer), "int8")(given)
        monkeypatch.setattr(linear, "library", lambda: None)
        model = nn.Sequential(copy.deepcopy(layer).to(dtype))
        name = str(dtype).removeprefix("torch.")
        assert packed_layers.pack(model).left == {f"{name} without a compiled product": 1}
        assert type(model[0]) is nn.Linear
        torch.testing.assert_close(in_a_model(layer, "int8")(given), wanted)


def test_tied_embeddings_stay_embeddings_and_the_head_is_packed(tmp_path: Path) -> None:
    made = tiny("gpt2", tie_word_embeddings=True)
    found = loaded(save(made, tmp_path), pack=False)
    model = found.model
    embedding = model.get_input_embeddings().weight.detach().clone()
    packed_layers.pack(model, smallest=0)
    assert isinstance(model.get_output_embeddings(), packed_layers.PackedLinear)
    assert torch.equal(model.get_input_embeddings().weight, embedding)
    assert (
        model.get_output_embeddings().out_features == found.vocab_size == TransformersRuntime(model).vocab_size == 300
    )
    torch.testing.assert_close(logits(model, PROMPTS), logits(made, PROMPTS), rtol=0.0, atol=1e-4)


def test_loading_packs_by_default_and_says_so(tmp_path: Path) -> None:
    save(tiny("gpt2", n_embd=256, tie_word_embeddings=True), tmp_path)
    found = loaded(tmp_path)
    assert found.notes == ("4 linear layers with genctl's own products, 5 left (small)",)
    plain = loaded(tmp_path, pack=False)
    assert plain.notes == ()
    assert not any(isinstance(module, packed_layers.PackedLinear) for module in plain.model.modules())
    torch.testing.assert_close(logits(found.model, PROMPTS), logits(plain.model, PROMPTS), rtol=0.0, atol=1e-4)


def test_int8_says_what_it_takes() -> None:
    (note,) = load(Runtime(quantize="int8", runtime="transformers")).notes
    assert note == "21 linear layers with weights in int8, 8 left (small); all weights 1.9 MiB, 3.6 MiB as read"
    (note,) = load(Runtime(quantize="int8")).notes
    assert note.startswith("17 linear layers with weights in int8 (17 ")
    assert note.endswith("; all weights 1.7 MiB, 3.6 MiB as read")


@pytest.mark.parametrize(
    ("device", "runtime", "said"),
    [
        ("cuda", "transformers", "--quantize int8 on transformers' classes runs on the CPU, not on cuda"),
        ("mps", "native", "--quantize int8 runs on the CPU, not on mps"),
    ],
)
def test_int8_is_refused_on_other_devices(
    device: str, runtime: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from genctl.models import hub

    monkeypatch.setattr(hub, "device_of", lambda name: torch.device(device))
    with pytest.raises(UsageError, match=said) as caught:
        load(Runtime(quantize="int8", runtime=runtime))
    assert caught.value.hint == "add --device cpu"


def test_a_model_without_a_layer_for_int8_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"--quantize int8: no layer of this model .*, 15 left \(small\)"):
        loaded(checkpoint("llama", tmp_path), quantize="int8")


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux tells what is mapped")
def test_originals_of_8_bit_weights_are_not_kept_in_memory(tmp_path: Path) -> None:
    """What was read of the file goes as soon as there are codes of it; plain weights stay mapped, in no copy."""
    torch.manual_seed(0)
    folder = save(tiny("gpt2", n_embd=512, n_layer=3, tie_word_embeddings=True), tmp_path)
    file = folder / "model.safetensors"
    held = {}
    for quantize in (None, "int8"):
        found = load(Runtime(model=str(folder), quantize=quantize, runtime="transformers"))
        held[quantize] = resident(file)
        del found
        gc.collect()
        assert resident(file) == 0  # what is counted next is the next model's
    assert held[None] > 0.9 * file.stat().st_size
    assert held["int8"] < 0.15 * file.stat().st_size


def resident(file: Path) -> int:
    """Bytes of a mapped file that are in memory."""
    held, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:
            inside = line.endswith(str(file))
        elif inside and line.startswith("Rss:"):
            held += int(line.split()[1])
    return held * 1024
