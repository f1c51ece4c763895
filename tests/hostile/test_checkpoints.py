"""Damaged checkpoints: one clear line each, exit status 3 or 2, and nothing is allocated that a config only claims."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.tool import Done, genctl, ok
from tests.hostile.damage import (
    CONFIG,
    GENERATION,
    INDEX,
    TOKENIZER,
    TOKENIZER_CONFIG,
    WEIGHTS,
    Damage,
    all_of,
    cut,
    edit,
    first,
    flip,
    folder_instead,
    header,
    link,
    pipe_instead,
    put,
    remove,
    sharded,
    sparse,
    tensors,
    write,
)

SHARD = "model-00001-of-00002.safetensors"
HEAD, WTE, NORM = "lm_head.weight", "transformer.wte.weight", "transformer.ln_f.weight"
GIGABYTE = 1 << 30
BIG = 10**9
CHARSMAP = "/////w=="  # says that 4 GB follow


def deep(levels: int) -> str:
    return '{"a": ' * levels + "1" + "}" * levels


def token(id: Any, content: str = "zz") -> dict[str, Any]:
    marks = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": id, "content": content, "special": True, **marks}


def doubling(kind: str) -> dict[str, Any]:
    step = {"type": "Replace", "pattern": {"String": " "}, "content": "  "}
    return {"type": "Sequence", {"normalizer": "normalizers", "decoder": "decoders"}[kind]: [step] * 40}


def template(single: list[dict[str, Any]], ids: list[int] | None = None) -> dict[str, Any]:
    tokens = {"<eos>": {"id": "<eos>", "ids": ids or [2], "tokens": ["<eos>"] * len(ids or [2])}}
    return {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": tokens}


def fixed(length: int) -> dict[str, Any]:
    return {
        "strategy": {"Fixed": length}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "<pad>",
    }  # fmt: skip


def framed(text: str) -> Damage:
    """A header and nothing else."""
    return write(WEIGHTS, struct.pack("<Q", len(text)) + text.encode())


def described(at: int = 0, **changes: Any) -> Damage:
    """Another description of the tensor that is at this place in the header."""
    return header(lambda parsed: first(parsed, at).update(changes))


NOTHING = '"a": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}'
CORRUPT: dict[str, Damage] = {  # what the safetensors library refuses, and a name twice
    **{f"weights cut to {share:.0%}": cut(WEIGHTS, share) for share in (0.0, 0.1, 0.9)},
    "weights without their last byte": cut(WEIGHTS, 1.0, by=1),
    "weights with a byte more": lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes() + b"\0"),
    **{f"header length, byte {at} bit {bit}": flip(WEIGHTS, at, bit) for at, bit in ((0, 0), (2, 1), (7, 7))},
    "header of 2^62 bytes": write(WEIGHTS, struct.pack("<Q", 1 << 62) + b"{}"),
    "header of a sparse terabyte": sparse(WEIGHTS, 1 << 40),
    "header as deep as a well": framed(deep(90_000)),
    "header a list": framed("[]"),
    "a tensor twice": framed(f"{{{NOTHING}, {NOTHING}}}"),
    "overlapping ranges": header(lambda parsed: first(parsed, 1).update(data_offsets=first(parsed, 2)["data_offsets"])),
    "a range of a terabyte": described(shape=[1 << 38], data_offsets=[0, 1 << 40]),
    "a shape whose product overflows": described(shape=[1 << 32, 1 << 32, 0]),
    "a negative range": described(data_offsets=[-8, 0]),
    "a negative shape": described(shape=[-1, 5]),
    "a shape of words": described(shape=["32", 32]),
    "a shape of 50,000 numbers": described(shape=[1 << 60] * 50_000),
    "a number of 4,000 digits": described(shape=[10**4000]),
    "a dtype of nobody": described(dtype="F7"),
    "a dtype that is a list": described(dtype=[]),
    "a dtype of another size": described(dtype="F16"),
    "a name that drives a terminal": header(lambda parsed: parsed.update({"\x1b]0;owned\x07\nerror: fine": 3})),
}
# name -> how a sound gpt2 is spoilt, and what the one line says
REFUSED: dict[str, tuple[Damage, str]] = {
    **{name: (damage, "model.safetensors is truncated or corrupt") for name, damage in CORRUPT.items()},
    **{
        f"header, byte {at} bit {bit}": (flip(WEIGHTS, at, bit), r"corrupt|tensors that the model needs|not used")
        for at, bit in ((8, 0), (20, 2), (61, 0))
    },
    # -- weights: tensors --------------------------------------------------------------------------------------------
    "no tensors": (write(WEIGHTS, struct.pack("<Q", 2) + b"{}"), "holds no tensors"),
    "a tensor is missing": (tensors(lambda held: held.pop(NORM)), f"lack 1 tensors that the model needs: {NORM}"),
    "a tensor renamed": (tensors(lambda held: held.update(stray=held.pop(NORM))), "lack 1 tensors"),
    "a tensor of another shape": (tensors(lambda held: held.update({NORM: torch.ones(7)})),
     f"{NORM}: the shape in the weight files is not the one that config.json implies"),
    "an empty tensor": (tensors(lambda held: held.update({NORM: torch.ones(0)})), "shape in the weight"),
    "whole numbers": (tensors(lambda held: held.update({HEAD: held[HEAD].long()})), "holds I64 numbers"),
    "NaN in the embedding": (put(WTE, float("nan")), f"tensor {WTE} holds 1 NaN or infinite"),
    "NaN everywhere": (tensors(lambda held: [value.fill_(float("nan")) for value in held.values()]),
     "holds [0-9,]+ NaN or infinite"),
    "NaN in half precision": (
        all_of(put(HEAD, float("nan")), tensors(lambda held: held.update({HEAD: held[HEAD].bfloat16()}))),
        f"tensor {HEAD} holds 1 NaN",
    ),
    # -- weights: files ----------------------------------------------------------------------------------------------
    "no weights": (remove(WEIGHTS), "has no weights: neither model.safetensors nor"),
    "weights that are a folder": (folder_instead(WEIGHTS), "has weights under another name|has no weights"),
    "weights that link to themselves": (link(WEIGHTS, WEIGHTS), "is a link to a file that is gone"),
    "weights that are a pipe": (pipe_instead(WEIGHTS), "model.safetensors in .* is no regular file"),
    "weights that are a device": (link(WEIGHTS, "/dev/zero"), "model.safetensors in .* is no regular file"),
    "only pickle": (all_of(remove(WEIGHTS), write("pytorch_model.bin", b"cos\nsystem\n(S'touch owned'\ntR.")),
     "has only pickle weights .* refused without --allow-pickle"),
    "an index to nowhere": (sharded({HEAD: SHARD, NORM: "model-00002-of-00002.safetensors"}), "1 of 2 shards are miss"),
    "an index to the outside": (sharded({HEAD: "../../etc/passwd"}), "names a weight file outside the folder"),
    "an index to a name that is no text": (sharded({HEAD: "\ud800.safetensors"}), "names a weight file"),
    "an index to a pickle": (sharded({HEAD: "x.bin"}), "or of another format: x.bin"),
    "an index to what is not in there": (sharded({"stranger": SHARD}), "holds stranger, but it does not"),
    "an index without a map": (all_of(remove(WEIGHTS), write(INDEX, '{"metadata": {}}')), "has no weight_map"),
    "an index of lists": (all_of(remove(WEIGHTS), write(INDEX, '{"weight_map": {"a": []}}')), "outside the folder"),
    "an index as deep as a well": (all_of(remove(WEIGHTS), write(INDEX, deep(90_000))), "not usable JSON|not JSON"),
    # -- config: the file --------------------------------------------------------------------------------------------
    "no config": (remove(CONFIG), "is not a checkpoint: it has no config.json"),
    "an empty config": (write(CONFIG, b""), "config.json is not JSON: expected a value at column 1"),
    "a config that is a folder": (folder_instead(CONFIG), "it has no config.json"),
    "a config that is a pipe": (pipe_instead(CONFIG), "config.json in .* is no regular file"),
    "a config that links to itself": (link(CONFIG, CONFIG), "it has no config.json"),
    "a config of 10 GB": (sparse(CONFIG, 10 * GIGABYTE), "has 10,737,418,240 bytes, too many"),
    "a config in UTF-16": (write(CONFIG, '{"model_type": "gpt2"}'.encode("utf-16")), "config.json is not UTF-8"),
    "a config cut in half": (cut(CONFIG, 0.5), "config.json is not JSON"),
    "a config as deep as a well": (write(CONFIG, deep(90_000)), "not usable JSON: nested too deeply"),
    "a config that says it twice": (write(CONFIG, '{"n_embd": 32, "n_embd": 64}'), "'n_embd' is given twice"),
    "a config with a number without end": (write(CONFIG, '{"n_embd": ' + "9" * 5000 + "}"), "not usable JSON"),
    "a list for a config": (write(CONFIG, "[]"), "holds a JSON list"),
    # -- config: lies ------------------------------------------------------------------------------------------------
    **{
        f"{name} = {value!r}"[:60]: (edit(CONFIG, **{name: value}), said or rf"{name} = |implies at least")
        for name, value, said in (
            ("n_embd", BIG, "far above what any model has"),
            ("n_embd", -32, "not a positive whole number"),
            ("n_embd", 0, "not a positive whole number"),
            ("n_embd", "wide", "not a positive whole number"),
            ("n_embd", 33, "shape in the weight|cannot be"),
            ("n_layer", 10**6, ""),
            ("n_layer", 60_000, "implies at least .* parameters, but the weight files hold"),
            ("n_layer", 3, "lack 12 tensors that the model needs: transformer.h.2"),
            ("n_head", BIG, ""),
            ("n_head", 0, "cannot be"),
            ("n_head", 5, "cannot be|shape in the weight"),
            ("n_positions", BIG, "far above"),
            ("n_positions", 10**7, ""),
            ("vocab_size", BIG, ""),
            ("vocab_size", 301, "shape in the weight|cannot be"),
            ("model_type", "nothing", "knows no architecture 'nothing'"),
            ("model_type", "bert", "tensors that the model needs"),
            ("model_type", {"a": 1}, "has no model_type"),
            ("activation_function", "os.system", "cannot be"),
            ("dtype", "float7", "cannot be"),
            ("text_config", {"hidden_size": BIG}, "hidden_size = "),
            ("architectures", [3], "architectures is not a list of names"),
            ("architectures", ["GPT2Model"], "has no language-model head"),
            ("transformers_weights", "../other.safetensors", "names its weights"),
            ("_attn_implementation", "somebody/kernel", "refused without --trust-remote-code"),
        )
    },
    "own code": (edit(CONFIG, model_type="own", auto_map={"AutoConfig": "own.Config"}),
     "runs only with --trust-remote-code"),
    # -- generation_config -------------------------------------------------------------------------------------------
    "a generation config cut in half": (cut(GENERATION, 0.5), "generation_config.json is not JSON"),
    "an end that the model does not have": (edit(GENERATION, eos_token_id=300), "eos_token_id is 300, but"),
    "words of ids that nobody has": (edit(GENERATION, bad_words_ids=[[-1]]), "-1 is not one of the 300 ids"),
    "a watermark of nobody": (edit(GENERATION, watermarking_config={"keys": [BIG]}),
     "watermarking_config|cannot be loaded"),
    "an end that is a word": (edit(GENERATION, eos_token_id="end"), "eos_token_id is 'end'|cannot be loaded"),
    # -- tokenizer ---------------------------------------------------------------------------------------------------
    "no tokenizer": (all_of(remove(TOKENIZER), remove(TOKENIZER_CONFIG)), "has no tokenizer"),
    "a tokenizer of 10 GB": (sparse(TOKENIZER, 10 * GIGABYTE), "too many to be one"),
    "a tokenizer that is a pipe": (pipe_instead(TOKENIZER), "is no regular file"),
    "a tokenizer that is a folder": (folder_instead(TOKENIZER), "has no tokenizer"),
    "a tokenizer without a model": (edit(TOKENIZER, model=...), "the tokenizer in .* cannot be loaded"),
    "a tokenizer of no known kind": (edit(TOKENIZER, model__type="Oracle"), "cannot be loaded"),
    "a token with the id 2^31": (edit(TOKENIZER, model__vocab={"a": 1 << 31}), "holds the id 2147483648, far above"),
    "an added token with the id 10^9": (edit(TOKENIZER, added_tokens=[token(BIG)]), "the id 1000000000, far above"),
    "padding to 10^9": (edit(TOKENIZER, padding=fixed(BIG)), "says Fixed = 1000000000, far above"),
    "a normaliser that doubles 40 times": (edit(TOKENIZER, normalizer=doubling("normalizer")), "its normalizer makes"),
    "a decoder that doubles 40 times": (edit(TOKENIZER, decoder=doubling("decoder")), "its decoder makes texts"),
    "a normaliser that prepends 20 MB": (edit(TOKENIZER, normalizer={"type": "Prepend", "prepend": "x" * 20_000_000}),
     "bytes of added tokens and settings, and at most 4,194,304"),
    "a post-processor that repeats the text": (
        edit(TOKENIZER, post_processor=template([{"Sequence": {"id": "A", "type_id": 0}}] * 30_000)),
        "its post_processor makes texts more than 100 times as long",
    ),
    "a post-processor that adds a million tokens": (
        edit(
            TOKENIZER,
            post_processor=template(
                [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<eos>", "type_id": 0}}],
                ids=[2] * 1_000_000,
            ),
        ),
        "bytes of added tokens and settings",
    ),
    "10^9 tokens that a class makes": (edit(TOKENIZER_CONFIG, extra_ids=BIG), "says extra_ids = 1000000000, far above"),
    "a charsmap of 4 GB": (edit(TOKENIZER, normalizer={"type": "Precompiled", "precompiled_charsmap": CHARSMAP}),
     "precompiled_charsmap is damaged"),
    "a broken pattern": (
        edit(
            TOKENIZER,
            pre_tokenizer={"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False},
        ),
        "cannot be loaded",
    ),
    "added tokens that are a pipe": (pipe_instead("added_tokens.json"), "is no regular file"),
    "a template that is a pipe": (pipe_instead("chat_template.jinja"), "is no regular file"),
    "a tokenizer config as deep as a well": (write(TOKENIZER_CONFIG, deep(90_000)), "tokenizer_config.json is not"),
    "a tokenizer class of nobody": (edit(TOKENIZER_CONFIG, added_tokens_decoder={str(BIG): {"content": "x"}}),
     "holds the id 100000000, far above"),
    "an adapter": (write("adapter_config.json", "{}"), "is an adapter"),
}  # fmt: skip


@pytest.fixture
def gpt2(checkpoint_of: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(checkpoint_of("gpt2"), tmp_path / "gpt2"))


def run(folder: Path, *options: str, prompt: str = "the cat") -> Done:
    return genctl("run", prompt, "-m", str(folder), "-n", "3", "--seed", "1", *options)


def one_line(done: Done) -> str:
    """The one line with which a run was refused."""
    line, *hint = done.err.splitlines()
    assert line.startswith("error: ")
    assert len(hint) <= 1
    assert all(each.startswith("hint: ") for each in hint)
    assert done.status in (2, 3), done.err
    assert done.out == ""
    assert done.err.replace("\n", "").isprintable()
    assert len(done.err) < 900
    assert not line.startswith("error: unexpected ")
    assert "not enough memory" not in line
    assert "Traceback" not in done.err
    return line


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.usefixtures("little_memory")
def test_a_damaged_checkpoint_is_refused_with_one_line(name: str, gpt2: Path) -> None:
    damage, said = REFUSED[name]
    damage(gpt2)
    assert re.search(said, one_line(run(gpt2)))
    assert not Path("owned").exists()


def test_the_same_folder_undamaged_runs(gpt2: Path) -> None:
    done = run(gpt2)
    assert (done.status, done.err) == (0, "")


def test_a_file_that_may_not_be_read_is_told(gpt2: Path) -> None:
    for name in (CONFIG, TOKENIZER, WEIGHTS):
        (gpt2 / name).chmod(0)
        if os.access(gpt2 / name, os.R_OK):
            pytest.skip("whoever runs the tests may read everything")
        assert re.search(f"cannot read {name}: Permission denied", one_line(run(gpt2)))
        (gpt2 / name).chmod(0o644)


HARMLESS: dict[str, Damage] = {
    "numbers with a flipped bit": all_of(*(flip(WEIGHTS, -at, 3) for at in range(1, 2000, 97))),
    "a tensor too many": tensors(lambda held: held.update(stray=torch.ones(3))),
    "outputs that a config asks for": edit(
        CONFIG, return_dict=False, output_hidden_states="yes", output_attentions=True
    ),
    "a template that does not parse": edit(TOKENIZER_CONFIG, chat_template="{% if %}"),
    "an endless context": edit(TOKENIZER_CONFIG, model_max_length=10**30),
    "a quantisation of nobody": edit(CONFIG, quantization_config={"quant_method": "nobody"}),
    "no generation config": remove(GENERATION),
    "a generation config that is a folder": folder_instead(GENERATION),
    "hostile knobs": edit(
        GENERATION, num_beams=10**9, temperature="hot", stop_strings=[3], trust_remote_code=True, allow_plugins=True,
        processors=[{"use": "os:system"}], model="/dev/zero", grammar="/dev/zero", json_schema="/dev/zero",
        assistant_model="somebody/else", amateur_model="somebody/else", custom_generate="somebody/else",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HARMLESS)
@pytest.mark.usefixtures("little_memory")
def test_what_is_odd_but_harmless_runs(name: str, gpt2: Path) -> None:
    HARMLESS[name](gpt2)
    done = run(gpt2)
    assert done.status == 0, done.err
    assert done.out.strip()


def test_a_checkpoint_cannot_say_what_else_is_read(gpt2: Path) -> None:
    HARMLESS["hostile knobs"](gpt2)
    told = run(gpt2, "--verbose").err
    for knob in ("grammar", "json_schema", "assistant_model", "amateur_model", "model", "processors"):
        assert re.search(rf"^note: generation_config.*: .*\b{knob}\b", told, re.MULTILINE), knob


def test_a_tokenizer_of_another_vocabulary_is_told_and_its_prompts_refused(gpt2: Path) -> None:
    more = [token(300 + n, f"<more{n}>") for n in range(5)]
    told = json.loads((gpt2 / TOKENIZER).read_text(encoding="utf-8"))
    edit(TOKENIZER, added_tokens=[*told["added_tokens"], *more])(gpt2)
    done = run(gpt2, "--verbose")
    assert done.status == 0
    assert "the tokenizer has 305 tokens, the model only 300" in done.err
    done = run(gpt2, prompt="a<more3>")
    assert done.status == 1
    assert "error: token 2 of the prompt has id 303, but the model's ids are 0 to 299" in done.err


@pytest.mark.parametrize("command", [("run",), ("run", "--runtime", "transformers"), ("tokens",)], ids=" ".join)
def test_a_tokenizer_that_adds_an_id_that_the_model_lacks_is_refused(command: tuple[str, ...], gpt2: Path) -> None:
    told = json.loads((gpt2 / TOKENIZER).read_text(encoding="utf-8"))
    parts = [{"SpecialToken": {"id": "<begin>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    begin = {"<begin>": {"id": "<begin>", "ids": [300], "tokens": ["<begin>"]}}
    after = {"type": "TemplateProcessing", "single": parts, "pair": parts, "special_tokens": begin}
    edit(TOKENIZER, added_tokens=[*told["added_tokens"], token(300, "<begin>")], post_processor=after)(gpt2)
    done = genctl(*command, "-m", str(gpt2), "the cat")
    assert done.status == 3
    assert "error: the tokenizer adds <begin> to each text, whose id is 300; the model's are 0 to 299" in done.err


def test_nothing_in_a_folder_is_run(gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    witness = tmp_path / "witness"
    code = f"import pathlib; pathlib.Path({str(witness)!r}).touch()\nclass Config: pass\nclass Model: pass\n"
    for name in ("own", "json", "torch", "tokenizers", "modeling_gpt2", "sitecustomize", "generate", "jinja2"):
        (gpt2 / f"{name}.py").write_text(code, encoding="utf-8")
    (gpt2 / "custom_generate").mkdir()
    (gpt2 / "custom_generate" / "generate.py").write_text(code, encoding="utf-8")
    (gpt2 / "genctl.toml").write_text("top_k = 3\ndo_sample = true\n", encoding="utf-8")
    mapped = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model", "AutoTokenizer": [None, "own.Model"]}
    edit(CONFIG, auto_map=mapped)(gpt2)
    edit(TOKENIZER_CONFIG, auto_map={"AutoTokenizer": [None, "own.Model"]}, chat_template="{{ messages }}")(gpt2)
    monkeypatch.chdir(gpt2)
    for options in ((), ("--chat",), ("--runtime", "transformers")):
        ok("run", "the cat", "-m", ".", "-n", "2", "--seed", "1", *options)
    assert not witness.exists()


def test_a_plugin_in_the_current_folder_is_not_loaded(
    gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    witness = tmp_path / "witness"
    Path("evil.py").write_text(f"import pathlib; pathlib.Path({str(witness)!r}).touch()\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(Path.cwd()))
    for table, item in (("processors", "evil:Processor"), ("stopping", "evil:Criterion")):
        Path("job.toml").write_text(f'[[{table}]]\nuse = "{item}"\n', encoding="utf-8")
        assert "--allow-plugins" in one_line(run(gpt2, "--config", "job.toml"))
    Path("job.toml").write_text('[[processors]]\nuse = "evil.Processor"\n', encoding="utf-8")
    assert 'unknown processor "evil.Processor"' in one_line(run(gpt2, "--config", "job.toml"))
    assert not witness.exists()
