"""Write traces of engines with planted faults, and count what `genctl audit` finds.

python scripts/make_traces.py FOLDER [--tokens 500] [--repeat 2] [--engines transformers,ctranslate2]
python scripts/make_traces.py FOLDER --measure [--chosen] [--jobs 1 --job 0] [--only CAUSE]
python scripts/make_traces.py FOLDER --clean 2000    (continues where it was stopped)

The engines are transformers and CTranslate2, if installed. Checkpoints are the built-in ones, some with a config.json
that the engine does not follow. FOLDER/traces.jsonl lists each trace with its cause.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

Rows: TypeAlias = list[dict[str, Any]]
Asked: TypeAlias = dict[str, Any]  # the options of the audit
Planted: TypeAlias = Callable[[], tuple[Rows, Asked]]
Number: TypeAlias = Callable[[Tensor, list[int], list[int]], Tensor]  # logits, prompt, new tokens -> reported numbers
STORIES: Asked = {"model": "builtin:stories"}
BUILTIN = Path(__file__).resolve().parent.parent / "genctl" / "models" / "builtin"
TOP = 20
PROMPTS = (
    "Once upon a time", "The dog ran to the park and", "Lily had a red ball.", "One day, a boy named Tom",
    "The sun was bright. Mia and her mom", "A little bird sat on", "Ben found a key in the garden.",
    "It was a cold night, and the cat", "Sam and Lucy wanted to", "In the forest lived a small bear who",
    "Tim was sad because", "The old man smiled and said", "Anna opened the big box. Inside",
    "Every morning the girl", "A frog jumped into the pond. Then", "Max liked to build",
)  # fmt: skip
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 12}


# -- engines: logits of the next token after ids -----------------------------------------------------------------------


class Engine:
    """Generates tokens one by one."""

    def begin(self) -> None:
        """Prepare for a new text."""

    def read(self, ids: list[int], new: list[int]) -> Tensor:
        """The logits f32 [V] after `ids`; `new` are the last of them, which were not read before."""
        raise NotImplementedError

    @torch.inference_mode()
    def write(self, prompt: list[int], choose: Callable[[Tensor], int], most: int) -> tuple[list[int], list[Tensor]]:
        """The chosen tokens, and the logits before each of them."""
        ids, found, new = list(prompt), list[Tensor](), prompt
        self.begin()
        for _ in range(most):
            found.append(self.read(ids, new))
            ids.append(choose(found[-1]))
            new = ids[-1:]
        return ids[len(prompt) :], found


class Transformers(Engine):
    def __init__(self, folder: Path, dtype: str = "float32", *, held: torch.dtype | None = None) -> None:
        """`held`: the dtype to which keys and values are rounded, if any."""
        transformers: Any = import_module("transformers")
        transformers.logging.set_verbosity_error()
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        self.held = held

    def begin(self) -> None:
        self.cache = None if self.held is None else _rounded_cache(self.held)

    def read(self, ids: list[int], new: list[int]) -> Tensor:
        answer = self.model(torch.tensor([new]), past_key_values=self.cache, use_cache=True)
        self.cache = answer.past_key_values
        logits: Tensor = answer.logits[0, -1].float()
        return logits


class CTranslate2(Engine):
    """CTranslate2, which reads the whole text again for each token."""

    def __init__(self, folder: Path, form: str = "float32") -> None:
        self.ct2: Any = import_module("ctranslate2")
        place = Path(tempfile.mkdtemp(prefix="traces-")) / "model"
        converter = import_module("ctranslate2.converters").TransformersConverter(str(folder), load_as_float16=False)
        converter.convert(str(place), force=True)
        self.model = self.ct2.Generator(str(place), compute_type=form, intra_threads=1)
        shutil.rmtree(place.parent)

    def read(self, ids: list[int], new: list[int]) -> Tensor:
        numpy: Any = import_module("numpy")
        batch, lengths = (
            self.ct2.StorageView.from_array(numpy.array(value, dtype="int32")) for value in ([ids], [len(ids)])
        )
        return torch.from_numpy(numpy.array(self.model.forward_batch(batch, lengths))[0, -1]).float()


def _without_tokenizer(writer: Any) -> None:
    writer.add_tokenizer_model("none")


def gguf(folder: Path, place: Path, form: str, describe: Callable[[Any], None] = _without_tokenizer) -> None:
    """Write a Llama checkpoint for llama.cpp, where RoPE rotates adjacent dimensions. `describe` adds fields."""
    writer_of: Any = import_module("gguf")
    quants: Any = import_module("gguf.quants")
    numpy: Any = import_module("numpy")
    load_file: Any = import_module("safetensors.numpy").load_file
    config = json.loads((folder / "config.json").read_text())
    heads, kv, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    kind = writer_of.GGMLQuantizationType[form]
    writer = writer_of.GGUFWriter(place, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    describe(writer)
    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "lm_head": "output",
    }  # fmt: skip
    for name, tensor in load_file(folder / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        if stem in names:
            theirs = names[stem]
        else:
            _, _, number, part = stem.split(".", 3)
            theirs = f"blk.{number}.{names[part]}"
            turned = {"self_attn.q_proj": heads, "self_attn.k_proj": kv}.get(part)
            if turned:
                tensor = tensor.reshape(turned, 2, -1, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape)
        held = kind if tensor.ndim > 1 else writer_of.GGMLQuantizationType.F32
        writer.add_tensor(
            f"{theirs}.weight", quants.quantize(numpy.ascontiguousarray(tensor, dtype="float32"), held), raw_dtype=held
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# -- traces ------------------------------------------------------------------------------------------------------------


def drawing(seed: int, greedy: bool) -> Callable[[Tensor], int]:
    generator = torch.Generator().manual_seed(seed)

    def choose(logits: Tensor) -> int:
        if greedy:
            return int(logits.argmax())
        return int(torch.multinomial(logits.double().softmax(-1), 1, generator=generator))

    return choose


def plain(logits: Tensor, before: list[int], written: list[int]) -> Tensor:
    return logits.double().log_softmax(-1)


def rows(
    engine: Any,
    prompts: list[tuple[list[int], list[int]]],
    tokens: int,
    seed: int,
    *,
    greedy: bool = False,
    number: Number = plain,
    each: int = 50,
    drawn: bool = False,
) -> Rows:
    """`prompts`: pairs of ids sent and ids that the engine reads. `drawn`: draw from the reported numbers."""
    found: Rows = []
    while sum(len(row["completion_ids"]) for row in found) < tokens:
        place = len(found)
        sent, read = prompts[place % len(prompts)]
        draw, written = drawing(seed * 1000 + place, greedy and place < len(prompts)), list[int]()

        def choose(logits: Tensor, read: Any = read, draw: Any = draw, written: list[int] = written) -> int:
            written.append(draw(number(logits, read, written) if drawn else logits))
            return written[-1]

        ids, logits = engine.write(read, choose, each)
        numbers, tops = [], []
        for index, (id, row) in enumerate(zip(ids, logits, strict=True)):
            values = number(row, read, ids[:index])
            numbers.append(float(values[id].float()))
            best = values.topk(TOP)
            pairs = zip(best.indices.tolist(), best.values.float().tolist(), strict=True)
            tops.append([[other, value] for other, value in pairs if math.isfinite(value)])
        found.append({"prompt_ids": sent, "completion_ids": ids, "logprobs": numbers, "top_logprobs": tops})
    return found


def warm(temperature: float) -> Number:
    return lambda logits, before, written: (logits.double() / temperature).log_softmax(-1)


def kept(name: str, value: float, temperature: float = 1.0) -> Number:
    """The filters of transformers."""
    transformers: Any = import_module("transformers")
    kind = {"top-k": "TopKLogitsWarper", "top-p": "TopPLogitsWarper", "min-p": "MinPLogitsWarper"}[name]
    warper = getattr(transformers, kind)(int(value) if name == "top-k" else value)

    def number(logits: Tensor, before: list[int], written: list[int]) -> Tensor:
        found: Tensor = warper(None, logits[None].double() / temperature)[0].log_softmax(-1)
        return found

    return number


def penalised(repetition: float) -> Number:
    def number(logits: Tensor, before: list[int], written: list[int]) -> Tensor:
        logits = logits.double().clone()
        for id in {*before, *written}:
            logits[id] = logits[id] / repetition if logits[id] > 0 else logits[id] * repetition
        return logits.log_softmax(-1)

    return number


def mapped(change: Callable[[float], float]) -> Callable[[Rows], Rows]:
    return lambda found: [
        {
            **row,
            "logprobs": [change(value) for value in row["logprobs"]],
            "top_logprobs": [[[id, change(value)] for id, value in top] for top in row["top_logprobs"]],
        }
        for row in found
    ]


def shifted(found: Rows) -> Rows:
    return [
        {
            **row,
            "logprobs": [None, *row["logprobs"][:-1]],
            "top_logprobs": [[], *row["top_logprobs"][:-1]],
        }
        for row in found
    ]


def drafted(found: Rows) -> Rows:
    return [
        {**row, "logprobs": [max(value for _, value in top) for top in row["top_logprobs"]], "top_logprobs": [
            [pair for pair in top if pair[0] != id]
            for top, id in zip(row["top_logprobs"], row["completion_ids"], strict=True)]}
        for row in found
    ]  # fmt: skip


def with_config(source: Path, place: Path, **fields: Any) -> Path:
    """A copy of a checkpoint with changed fields in config.json."""
    shutil.copytree(source, place, dirs_exist_ok=True)
    config = json.loads((place / "config.json").read_text()) | fields
    (place / "config.json").write_text(json.dumps(config))
    return place


def with_weights(source: Path, place: Path, change: Callable[[dict[str, Tensor]], None], **fields: Any) -> Path:
    torch_files: Any = import_module("safetensors.torch")
    with_config(source, place, **fields)
    tensors = torch_files.load_file(source / "model.safetensors")
    change(tensors)
    torch_files.save_file(tensors, place / "model.safetensors", {"format": "pt"})
    return place


def noisy(tensors: dict[str, Tensor]) -> None:
    generator = torch.Generator().manual_seed(5)
    for name, tensor in tensors.items():
        if tensor.ndim > 1:
            tensor += 0.02 * tensor.std() * torch.randn(tensor.shape, generator=generator)
            tensors[name] = tensor


def traces(folder: Path, arguments: argparse.Namespace) -> Iterator[tuple[str, str, Rows, Asked]]:
    """Engine, cause, rows and audit options of each trace."""
    stories = BUILTIN / "stories"
    have = {name for name in arguments.engines.split(",") if _installed(name)}
    for seed in range(arguments.repeat):
        make = maker(stories, arguments.tokens, seed)
        if "transformers" in have:
            for cause, plant in planted(stories, folder / "models", make, random.Random(seed)):
                yield "transformers", cause, *plant()
        if "ctranslate2" in have:
            for cause in ("int8", "bfloat16"):
                with suppress(ValueError):  # not every CPU supports it
                    yield "ctranslate2", cause, make(CTranslate2(stories, cause), greedy=False), STORIES


def maker(folder: Path, tokens: int, seed: int = 0, each: int = 50) -> Callable[..., Rows]:
    """A function that makes rows of at least `tokens` tokens with an engine, after texts.

    Its `read` converts the ids sent to the ids that the engine reads, or is a list of such pairs in place of texts.
    """
    encoded = encoded_by(folder)

    def make(engine: Any, texts: Sequence[str] = PROMPTS, read: Any = list, **how: Any) -> Rows:
        prompts = [(ids, read(ids)) for ids in map(encoded, texts)] if callable(read) else read
        return rows(engine, prompts, tokens, seed, **{"greedy": seed % 2 == 1, "each": each, **how})

    return make


def encoded_by(folder: Path) -> Callable[[str], list[int]]:
    tokenizer: Any = import_module("tokenizers").Tokenizer.from_file(str(folder / "tokenizer.json"))
    return lambda text: list(tokenizer.encode(text).ids)


def planted(stories: Path, models: Path, make: Any, draw: random.Random) -> Iterator[tuple[str, Planted]]:
    """Each cause, with a function that makes a trace of transformers with it. `make` comes from `maker`."""
    engine = cache(Transformers)

    def told(
        asked: Asked = STORIES, place: Path = stories, dtype: str = "float32", held: Any = None, change: Any = list,
        **how: Any,
    ) -> tuple[Rows, Asked]:  # fmt: skip
        return change(make(engine(place, dtype, held=held), **how)), asked

    t, k, p = draw.choice([0.6, 0.7, 0.8, 1.3]), draw.choice([10, 20, 50]), draw.choice([0.8, 0.9, 0.95])
    for cause, number in {
        "temperature": warm(t), "top-k": kept("top-k", k), "top-p": kept("top-p", p), "min-p": kept("min-p", 0.05),
        "temperature top-p": kept("top-p", p, t), "repetition": penalised(draw.choice([1.1, 1.2, 1.3])),
    }.items():  # fmt: skip
        yield cause, partial(told, number=number, drawn=True, greedy=False)
    for cause, change in {
        "base-2": mapped(lambda value: value / math.log(2)), "base-10": mapped(lambda v: v / math.log(10)),
        "probability": mapped(math.exp), "negated": mapped(lambda v: -v), "shifted": shifted, "drafted": drafted,
        "digits": mapped(lambda value: round(value, 2)),
        "dtype": mapped(lambda value: float(torch.tensor(value).bfloat16())),
    }.items():  # fmt: skip
        yield cause, partial(told, change=change)
    limit, bos, encoded = draw.choice([12, 16, 20]), 1, encoded_by(stories)
    longer = [" ".join(PROMPTS[place : place + 4]) for place in range(len(PROMPTS) - 4)]
    yield "bos-missing", partial(told, read=lambda ids: ids[1:])
    yield "bos-doubled", partial(told, read=lambda ids: [bos, *ids])
    yield "bos-doubled temperature", partial(told, read=lambda ids: [bos, *ids], number=warm(t))
    yield "truncated", partial(told, texts=longer, read=lambda ids: ids[-limit:])
    yield "spaces", partial(told, read=[(encoded(f"{text} "), encoded(text)) for text in PROMPTS])
    for dtype in ("bfloat16", "float16"):
        yield dtype, partial(told, dtype=dtype)
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    for cause, fields in {
        "rope-scaling-ignored": {"rope_parameters": rope}, "epsilon": {"rms_norm_eps": 1e-5},
        "rope-theta-ignored": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        "window-ignored": MISTRAL,
    }.items():  # fmt: skip
        yield cause, partial(told, {"model": str(with_config(stories, models / cause, **fields))})
    place = with_weights(stories, models / "other", noisy)
    yield "checkpoint-other", partial(told, {**STORIES, "also": str(place)}, place)
    for cause, form in {
        "int8-weights": symmetric8, "int4": partial(grouped4, size=32), "int4-128": partial(grouped4, size=128),
        "nf4": normal4, "fp8": scaled8,
    }.items():  # fmt: skip
        yield cause, partial(told, place=with_weights(stories, models / cause, partial(linears, change=form)))
    for cause, held in (("cache-fp8", torch.float8_e4m3fn), ("cache-bfloat16", torch.bfloat16)):
        yield cause, partial(told, held=held)
    adapter, ranks = {**STORIES, "adapter": str(models / "adapter")}, lora(stories, models / "adapter")
    yield "adapter-missing", partial(told, adapter)
    place = with_weights(stories, models / "twice", partial(merged, ranks=ranks, times=2))
    yield "adapter-doubled", partial(told, adapter, place)
    place = with_config(stories, models / "window-11", **{**MISTRAL, "sliding_window": 11})
    asked = {"model": str(with_config(stories, models / "window-ignored", **MISTRAL))}
    yield "window-off-by-one", partial(told, asked, place)
    capped = gemma(stories, models / "capped")
    for cap in ("final_logit_softcapping", "attn_logit_softcapping"):
        place = with_config(capped, models / cap, **{cap: None})
        yield "softcap-missing", partial(told, {"model": str(capped)}, place)
    yield from _chats(stories, models / "chat", told)


def _chats(stories: Path, place: Path, told: Any) -> Iterator[tuple[str, Planted]]:
    """A checkpoint with the ChatML template and its markers as special tokens, and engines that render differently."""
    with_config(stories, place)
    special = ("<|im_start|>", "<|im_end|>")
    tokenizer = json.loads((place / "tokenizer.json").read_text())
    for text in special:  # they replace the tokens of the last merges
        id = tokenizer["model"]["vocab"].pop("".join(tokenizer["model"]["merges"].pop()))
        tokenizer["model"]["vocab"][text] = id
        tokenizer["added_tokens"] = [one for one in tokenizer["added_tokens"] if one["id"] != id] + [
            {"id": id, "content": text, "special": True, "normalized": False, "lstrip": False, "rstrip": False,
             "single_word": False}]  # fmt: skip
    (place / "tokenizer.json").write_text(json.dumps(tokenizer))
    (place / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    loaded: Any = import_module("transformers").AutoTokenizer.from_pretrained(place)
    plain: Any = import_module("tokenizers").Tokenizer.from_file(str(place / "tokenizer.json"))
    plain.encode_special_tokens = True
    chats = [[{"role": "system", "content": "You tell short tales."}, {"role": "user", "content": text}]
             for text in PROMPTS]  # fmt: skip

    def sent(messages: Any, *, as_text: bool = False, **how: Any) -> list[int]:
        text = loaded.apply_chat_template(messages, tokenize=False, **{"add_generation_prompt": True, **how})
        ids: list[int] = plain.encode(text, add_special_tokens=False).ids if as_text else loaded(
            text, add_special_tokens=False)["input_ids"]  # fmt: skip
        return ids

    def bare(messages: Any, form: str = "{}") -> list[int]:
        ids: list[int] = loaded(form.format(messages[-1]["content"]))["input_ids"]
        return ids

    for cause, read in {
        "system-lost": lambda one: sent(one[1:]), "no-generation-prompt": lambda one: sent(
            one, add_generation_prompt=False), "special-as-text": lambda one: sent(one, as_text=True),
        "template-missing": bare, "template-other": lambda one: bare(one, "[INST] {} [/INST]"),
    }.items():  # fmt: skip
        some = [chat[1:] for chat in chats] if cause.startswith("template") else chats

        def sent_as(found: Rows, some: Any = some) -> Rows:
            return [{"messages": some[row.pop("prompt_ids")], **row} for row in found]

        pairs = [(number, read(chat)) for number, chat in enumerate(some)]
        yield cause, partial(told, {"model": str(place)}, change=sent_as, read=pairs)


# Weight formats of other engines: only linear layers, each row of a matrix on its own


def linears(tensors: dict[str, Tensor], change: Callable[[Tensor], Tensor]) -> None:
    for name in tensors:
        if name.endswith("proj.weight"):
            tensors[name] = change(tensors[name])


def symmetric8(rows: Tensor) -> Tensor:
    scale = rows.abs().amax(1, keepdim=True) / 127
    return torch.round(rows / scale).clamp(-128, 127) * scale


def scaled8(rows: Tensor) -> Tensor:
    scale = rows.abs().amax(1, keepdim=True) / 448  # as in compressed-tensors
    return (rows / scale).to(torch.float8_e4m3fn).float() * scale


def grouped4(rows: Tensor, size: int) -> Tensor:
    if rows.shape[1] % size:
        return rows
    blocks = rows.view(len(rows), -1, size)
    low, high = blocks.min(2, True).values.clamp(max=0), blocks.max(2, True).values.clamp(min=0)
    step = (high - low) / 15
    zero = torch.round(-low / step)
    return ((torch.clamp(torch.round(blocks / step) + zero, 0, 15) - zero) * step).view_as(rows)


def normal4(rows: Tensor) -> Tensor:
    """bitsandbytes' NF4: quantiles of the normal distribution, blocks of 64 in the order of storage."""
    normal = torch.distributions.Normal(0, 1)
    offset = 0.9677083
    positive = normal.icdf(torch.linspace(offset, 0.5, 9)[:-1])
    negative = -normal.icdf(torch.linspace(offset, 0.5, 8)[:-1])
    levels = torch.cat([positive, torch.zeros(1), negative]).sort().values
    levels = levels / levels.max()
    blocks = rows.reshape(-1, 64)
    scale = blocks.abs().amax(1, keepdim=True)
    return levels[(blocks[..., None] / scale[..., None] - levels).abs().argmin(-1)].mul(scale).view_as(rows)


def lora(source: Path, place: Path) -> dict[str, Tensor]:
    """Write a LoRA adapter, and return its tensors."""
    torch_files: Any = import_module("safetensors.torch")
    generator, found = torch.Generator().manual_seed(8), {}
    for name, tensor in torch_files.load_file(source / "model.safetensors").items():
        if name.endswith(("q_proj.weight", "v_proj.weight")):
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            found[f"{stem}.lora_A.weight"] = 0.1 * torch.randn(4, tensor.shape[1], generator=generator)
            found[f"{stem}.lora_B.weight"] = 0.05 * torch.randn(tensor.shape[0], 4, generator=generator)
    place.mkdir(parents=True, exist_ok=True)
    torch_files.save_file(found, place / "adapter_model.safetensors", {"format": "pt"})
    (place / "adapter_config.json").write_text(json.dumps({
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"],
        "bias": "none", "base_model_name_or_path": str(source), "lora_dropout": 0.0,
    }))  # fmt: skip
    return found


def merged(tensors: dict[str, Tensor], ranks: dict[str, Tensor], times: int) -> None:
    for name in tensors:
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{stem}.lora_A.weight" in ranks:
            tensors[name] = (
                tensors[name] + times * 2.0 * ranks[f"{stem}.lora_B.weight"] @ ranks[f"{stem}.lora_A.weight"]
            )


def gemma(source: Path, place: Path) -> Path:
    """A Gemma 2 with random weights, soft caps that take effect, and the tokenizer of `source`."""
    transformers: Any = import_module("transformers")
    torch.manual_seed(4)
    config = transformers.Gemma2Config(
        vocab_size=1536, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, final_logit_softcapping=4.0, attn_logit_softcapping=1.0,
        initializer_range=0.25, max_position_embeddings=512, query_pre_attn_scalar=16, sliding_window=512,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    transformers.Gemma2ForCausalLM(config).save_pretrained(place)
    for file in source.glob("token*"):
        shutil.copy(file, place)
    return place


def _rounded_cache(dtype: torch.dtype) -> Any:
    """A cache of transformers that rounds keys and values to another dtype."""
    cache: Any = import_module("transformers").DynamicCache()
    update = cache.update

    def rounded(keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
        return update(keys.to(dtype).float(), values.to(dtype).float(), *args, **kwargs)

    cache.update = rounded
    return cache


def _installed(name: str) -> bool:
    if find_spec(name) is not None:
        return True
    print(f"{name}: not installed, so it writes no traces (pip install {name})")
    return False


# -- results of the audit ----------------------------------------------------------------------------------------------


def read(path: Path) -> Rows:
    """The lines of a file; [] if it does not exist."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def write(path: Path, lines: Rows) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def audited(path: Path, found: Rows, asked: Asked) -> Rows:
    """The records of an audit of rows, which are written to `path` and removed afterwards."""
    from genctl.commands.app import run

    out = path.with_suffix(".found.jsonl")
    words = ["--format", "jsonl", "-o", str(out), "--force", "-q", "--allow", "unexplained"]
    run(["audit", str(write(path, found)), *(f"--{key}={value}" for key, value in asked.items()), *words])
    records = read(out)
    for made in (path, out):
        made.unlink()
    return records


def measure(folder: Path, arguments: argparse.Namespace) -> None:
    """Audit the traces, and count those with the right cause first, and those with the cause named."""
    right, named, total = Counter[str](), Counter[str](), Counter[str]()
    for number, one in enumerate(read(folder / "traces.jsonl")):
        cause = one["cause"]
        if number % arguments.jobs != arguments.job or (arguments.only and arguments.only not in cause):
            continue
        found = [{**row, "top_logprobs": None} if arguments.chosen else row for row in read(folder / one["file"])]
        audit = audited(folder / f"measured-{number}.jsonl", found, one["asked"])
        keys = {cause["key"] for cause in audit[0]["causes"]}
        first = keys or set((audit[0]["candidates"] or audit[1:] or [{"causes": []}])[0]["causes"])
        total[cause] += 1
        right[cause] += first == set(cause.split())
        named[cause] += keys == set(cause.split())
        if keys != set(cause.split()):
            print(f"{one['file']}: {cause}: {audit[0]['verdict']}: {audit[0]['reason']}", flush=True)
    print(f"right cause first: {right.total()} of {total.total()}; named: {named.total()}")
    for cause in total:
        print(f"  {cause:26} {right[cause]}/{total[cause]} first, {named[cause]}/{total[cause]} named")


# -- traces without a cause --------------------------------------------------------------------------------------------

CLEAN: dict[str, tuple[Callable[[Path], Engine], Asked]] = {
    "transformers float32": (Transformers, {}),
    "transformers bfloat16": (lambda place: Transformers(place, "bfloat16"), {"dtype": "bfloat16"}),
    "ctranslate2 float32": (CTranslate2, {}),
    "ctranslate2 int8": (lambda place: CTranslate2(place, "int8"), {"quantize": "int8"}),
}


def clean(folder: Path, arguments: argparse.Namespace) -> None:
    """Audit short traces without a cause, one for each number; numbers in FOLDER/clean.jsonl are skipped."""
    torch.set_num_threads(1)
    have = {name for name in arguments.engines.split(",") if _installed(name)}
    names = [name for name in CLEAN if name.partition(" ")[0] in have]
    stories, models = BUILTIN / "stories", folder / "models"
    theta = {"rope_theta": 5e5, "rope_type": "default"}
    places = {
        "stories": stories, "noisy": with_weights(stories, models / "noisy", noisy),
        "theta": with_weights(stories, models / "long", noisy, rope_parameters=theta, rms_norm_eps=1e-5),
    }  # fmt: skip
    texts = [*map(encoded_by(stories), PROMPTS)]
    engine = cache(lambda name, model: CLEAN[name][0](places[model]))
    path = folder / "clean.jsonl"
    done = {line["number"] for line in read(path)}
    for number in range(arguments.clean):
        if number in done or number % arguments.jobs != arguments.job:
            continue
        draw = random.Random(number)
        name, model = names[number % len(names)], draw.choice([*places])
        tokens, greedy, top = draw.choice([24, 40, 60]), draw.random() < 0.4, draw.random() < 0.6
        some = [(ids, ids) for ids in draw.sample(texts, 4)]
        each = draw.choice([8, 12, 20])
        found = rows(engine(name, model), some, tokens, 10_000 + number, greedy=greedy, each=each)
        found = found if top else [{**row, "top_logprobs": None} for row in found]
        asked = {"model": str(places[model]), **CLEAN[name][1]}
        audit = audited(folder / f"clean-{number}.jsonl", found, asked)[0]
        line = {"number": number, "engine": name, "model": model, "tokens": tokens, "greedy": greedy, "lists": top,
                "verdict": audit["verdict"], "reason": audit["reason"]}  # fmt: skip
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")
    lines = read(path)
    for name in sorted({line["engine"] for line in lines}):
        print(f"  {name:22} {dict(Counter(line['verdict'] for line in lines if line['engine'] == name))}")
    print(f"accused: {sum(line['verdict'] == 'explained' for line in lines)} of {len(lines)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--clean", type=int, default=0)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--engines", default="transformers,ctranslate2")
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--chosen", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--job", type=int, default=0)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if arguments.measure or arguments.clean:
        (measure if arguments.measure else clean)(arguments.folder, arguments)
        return
    with (arguments.folder / "traces.jsonl").open("w") as listed:
        for number, (engine, cause, found, asked) in enumerate(traces(arguments.folder, arguments)):
            name = f"{number:04}-{engine}-{cause.replace(' ', '+') or 'clean'}.jsonl"
            write(arguments.folder / name, found)
            listed.write(json.dumps({"file": name, "cause": cause, "asked": asked}) + "\n")
            listed.flush()


if __name__ == "__main__":
    sys.exit(main())
