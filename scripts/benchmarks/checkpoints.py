"""Checkpoints of real sizes with random weights, made on the fly; the same ones in the forms that peers read.

Random weights at their usual scale give flat distributions, whose argmax flips with the order of a sum. Here logits
spread by about 4, so that top-p has something to cut and the best token is clearly the best. The special tokens have
embeddings of zero, which makes their logits the same as an average token's: EOS never wins, so every length is fixed.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from . import gguf_files

QUIET = 0.02  # of what a layer adds where the layers before it decide
SPECIAL = ("<pad>", "<eos>", "<unk>")  # ids 0, 1, 2; the others are w3, w4 …


@dataclass(frozen=True)
class Size:
    """A checkpoint to make: its architecture and fields of its config."""

    name: str
    model_type: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    deciding: int | None = None  # so many first layers say nearly what all say; None: each layer matters alike
    by_heart: tuple[int, ...] = ()  # GPT-2: the text that it writes, token after token, whatever it reads

    @property
    def vocabulary(self) -> int:
        return int(self.fields["vocab_size"])

    @property
    def encoder_decoder(self) -> bool:
        return self.model_type == "t5"

    @property
    def layers(self) -> int:
        return int(self.fields["n_layer" if self.model_type == "gpt2" else "num_hidden_layers"])

    @property
    def hidden(self) -> int:
        return int(self.fields["n_embd" if self.model_type == "gpt2" else "hidden_size"])

    @property
    def inner(self) -> int:
        """Width of an MLP."""
        return 4 * self.hidden if self.model_type == "gpt2" else int(self.fields["intermediate_size"])

    @property
    def heads(self) -> int:
        return int(self.fields["n_head" if self.model_type == "gpt2" else "num_attention_heads"])

    @property
    def kv_heads(self) -> int:
        return self.heads if self.model_type == "gpt2" else int(self.fields["num_key_value_heads"])


def gpt2(name: str = "gpt2-small", vocabulary: int = 50257, positions: int = 1024, **fields: Any) -> Size:
    """GPT-2 small: 12 layers of 768, 124 M parameters with 50,257 tokens."""
    shape = {"n_layer": 12, "n_head": 12, "n_embd": 768, **fields}
    return Size(name, "gpt2", {"vocab_size": vocabulary, "n_positions": positions, **shape})


def qwen2(name: str = "qwen2-0.5b", vocabulary: int = 151936, positions: int = 32768, **fields: Any) -> Size:
    """Qwen2.5-0.5B: 24 layers of 896, 14 heads that share 2 for keys and values, 494 M parameters."""
    shape = {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        **fields,
    }
    return Size(name, "qwen2", {"vocab_size": vocabulary, "max_position_embeddings": positions, **shape})


def deep(name: str = "qwen2-deep", vocabulary: int = 4096, positions: int = 2048, **fields: Any) -> Size:
    """24 layers of 512, 77 M parameters, of which the first 2 with the head (a tenth) draft well."""
    shape = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, **fields}
    return replace(qwen2(name, vocabulary, positions, **shape), deciding=2)


def t5(name: str = "t5-small", vocabulary: int = 32128, **fields: Any) -> Size:
    """T5-small: 6 + 6 layers of 512, 61 M parameters."""
    shape = {"d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8, **fields}
    return Size(name, "t5", {"vocab_size": vocabulary, **shape})


def installed(module: str) -> bool:
    """Whether a module is there, without importing it."""
    return importlib.util.find_spec(module) is not None


def make(size: Size, form: str, folder: Path) -> Path:
    """Write `size` to `folder` in a form and return where it lies; nothing is done if it is there already.

    Every form but "transformers" is made from that one, which must be in the same folder.
    """
    place = folder / size.name / form
    if not place.exists():
        source = folder / size.name / "transformers"
        # a conversion cut short leaves nothing under the real name
        with tempfile.TemporaryDirectory(dir=folder) as aside:
            part = Path(aside) / form
            if form == "transformers":
                _transformers(size, part)
            elif form == "ctranslate2":
                _ctranslate2(source, part)
            else:
                gguf_files.write(size, source, part, form)
            place.parent.mkdir(exist_ok=True)
            part.rename(place)
    return place


def _transformers(size: Size, place: Path) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    ids = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    if size.encoder_decoder:
        config = transformers.T5Config(**size.fields, **ids, decoder_start_token_id=0)
        model: Any = transformers.T5ForConditionalGeneration(config)
    elif size.model_type == "qwen2":
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**size.fields, **ids))
    else:
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**size.fields, **ids))
    _sharpen(model)
    if size.deciding is not None:
        _quieten(model.model.layers[size.deciding :], "self_attn.o_proj", "mlp.down_proj")
    if size.by_heart:
        _learn(model, size.by_heart)
    model.eval().save_pretrained(place)
    _tokenizer(size).save_pretrained(place)


def _sharpen(model: Any) -> None:
    """Draw all matrices anew, so that logits spread by about 4 and what a layer adds outweighs the token's echo."""
    import torch

    head = model.get_output_embeddings().weight
    scaled = getattr(model.config, "scale_decoder_outputs", False)  # T5 divides what its head reads
    spread = 4.0 if scaled else 4.0 / head.shape[1] ** 0.5
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim < 2:
                continue
            if weight is head or name.endswith("wpe.weight"):
                weight.normal_(0.0, spread)
                continue
            inputs = weight.shape[0] if model.config.model_type == "gpt2" else weight.shape[1]
            weight.normal_(0.0, _gain(name, spread) / inputs**0.5)
        head[: len(SPECIAL)] = 0.0


def _quieten(layers: Any, *outputs: str) -> None:
    """Let layers add little, as the later layers of a trained model often do."""
    import torch

    with torch.no_grad():
        for layer in layers:
            for name in outputs:
                layer.get_submodule(name).weight.mul_(QUIET)


def _learn(model: Any, text: tuple[int, ...]) -> None:
    """Let each position say the token that comes next, louder than all else."""
    import torch

    _quieten(model.transformer.h, "attn.c_proj", "mlp.c_proj")
    with torch.no_grad():
        following = model.get_output_embeddings().weight[list(text[1:])]
        model.transformer.wpe.weight[: len(text) - 1] = 3 * following


def _gain(name: str, spread: float) -> float:
    if "EncDecAttention" in name or "relative_attention_bias" in name:
        return 1.0
    if name.endswith((".q.weight", ".k.weight")):  # T5 does not scale its attention
        return 0.6
    return 1.5 * max(1.0, spread)


def _tokenizer(size: Size) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if size.model_type == "qwen2" and size.vocabulary > 1000:  # as large as the family's own: it counts for peak memory
        made = Tokenizer(_pairs(size.vocabulary))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
    else:
        words = [*SPECIAL, *(f"w{number}" for number in range(len(SPECIAL), size.vocabulary))]
        made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=SPECIAL[2]))
        made.pre_tokenizer = pre_tokenizers.Whitespace()
    pad, eos, unknown = SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=pad, eos_token=eos, unk_token=unknown, bos_token=eos
    )


def _pairs(count: int) -> Any:
    """A BPE vocabulary of so many tokens: bytes, and every token with one more letter, the short ones first."""
    from tokenizers import models, pre_tokenizers

    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = [character for character in characters if character.isascii() and character.isalpha()]
    tokens, merges, longer = [*SPECIAL, *characters], [], list(letters)
    for token in longer:  # grows
        for letter in letters[: count - len(tokens)]:
            merges.append((token, letter))
            tokens.append(token + letter)
            longer.append(token + letter)
        if len(tokens) == count:
            break
    return models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges)


def _ctranslate2(source: Path, place: Path) -> None:
    converters: Any = import_module("ctranslate2.converters")
    converters.TransformersConverter(str(source)).convert(str(place))
