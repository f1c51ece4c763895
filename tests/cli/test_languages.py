"""`src_lang` and `tgt_lang`: the texts of transformers' tokenizer and generate() with the same languages."""

from __future__ import annotations

import importlib.util
import json
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers

from tests.cli.tool import genctl
from tests.tiny import sharpen, tiny

WORDS = ["the", "cat", "sat", "dog", "ran", "home", "red", "ball"]
TEXT = "the cat sat"
SHAPE = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
         "decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}  # fmt: skip
KINDS = {"nllb": ("eng_Latn", "fra_Latn", "deu_Latn"), "mbart": ("en_XX", "fr_XX", "de_DE"),
         "mbart50": ("en_XX", "fr_XX", "de_DE"), "m2m": ("en", "fr", "de")}  # fmt: skip


def tokenizer_of(kind: str, folder: Path) -> Any:
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    pieces = [f"▁{word}" for word in WORDS] + ["▁", *"abcdefghijklmnopqrstuvwxyz"]
    if kind == "nllb":
        merges = [(f"▁{word[:end]}", word[end]) for word in WORDS for end in range(len(word))]
        begun = list(dict.fromkeys(left + right for left, right in merges))
        vocab = {token: id for id, token in enumerate(dict.fromkeys([*special, *pieces, *begun]))}
        return transformers.NllbTokenizer(vocab=vocab, merges=list(dict.fromkeys(merges)))
    scored = [(token, 0.0 if token in special else -float(id)) for id, token in enumerate([*special, *pieces])]
    if kind != "m2m":
        return {"mbart": transformers.MBartTokenizer, "mbart50": transformers.MBart50Tokenizer}[kind](vocab=scored)
    if importlib.util.find_spec("sentencepiece") is None:
        pytest.skip("the tokenizer of M2M-100 needs sentencepiece")
    import sentencepiece

    (folder / "words.txt").write_text("\n".join(" ".join(WORDS[at:] + WORDS[:at]) for at in range(8)) * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "words.txt"), model_prefix=str(folder / "spm"), vocab_size=36, hard_vocab_limit=False
    )
    model = sentencepiece.SentencePieceProcessor(str(folder / "spm.model"))
    names = [*special, *(model.id_to_piece(id) for id in range(3, model.get_piece_size()))]
    (folder / "vocab.json").write_text(json.dumps({name: id for id, name in enumerate(names)}))
    return transformers.M2M100Tokenizer(str(folder / "vocab.json"), str(folder / "spm.model"))


class Translator(NamedTuple):
    """A tiny checkpoint with random weights."""

    folder: Path
    tokenizer: Any
    model: Any
    languages: tuple[str, str, str]


@pytest.fixture(scope="module", params=KINDS)
def translator(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Translator:
    folder = tmp_path_factory.mktemp(request.param)
    tokenizer = tokenizer_of(request.param, folder)
    ids = {"vocab_size": len(tokenizer) + 110, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
    is_mbart = request.param.startswith("mbart")
    config = (transformers.MBartConfig if is_mbart else transformers.M2M100Config)(
        **SHAPE, **ids, max_position_embeddings=64, decoder_start_token_id=2, tie_word_embeddings=False
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        made = (
            transformers.MBartForConditionalGeneration if is_mbart else transformers.M2M100ForConditionalGeneration
        )(config)
        sharpen(made)
        with torch.no_grad():  # makes a text depend on each token of its source
            for name, weight in made.named_parameters():
                weight.mul_(5.0 if "encoder_attn" in name and weight.ndim == 2 else 1.0)
    made.generation_config.forced_eos_token_id = None
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Translator(folder, transformers.AutoTokenizer.from_pretrained(folder), made.eval(), KINDS[request.param])


def expected(one: Translator, source: str | None, target: str | None) -> list[int]:
    tokenizer = one.tokenizer
    before = tokenizer.src_lang
    tokenizer.src_lang = source or before
    inputs = tokenizer(TEXT, return_tensors="pt")
    tokenizer.src_lang = before
    language = getattr(tokenizer, "get_lang_id", tokenizer.convert_tokens_to_ids)
    forced = {} if target is None else {"forced_bos_token_id": language(target)}
    ids = one.model.generate(**inputs, max_new_tokens=6, do_sample=False, num_beams=1, **forced)[0]
    return [int(id) for id in ids[1:]]


def test_texts_are_those_of_transformers(translator: Translator, tmp_path: Path) -> None:
    folder, (english, french, german) = translator.folder, translator.languages
    run = partial(genctl, "run", "-m", str(folder), "-n", "6", "--format", "jsonl")
    done = run("--src-lang", french, "--tgt-lang", german, TEXT)
    assert done.status == 0, done.err
    (record,) = done.records
    assert record["token_ids"] == expected(translator, french, german)
    assert (record["src_lang"], record["tgt_lang"]) == (french, german)
    rows = tmp_path / "rows.jsonl"
    params: list[dict[str, str]] = [{}, {"tgt_lang": french}, {"src_lang": german, "tgt_lang": english}, {}]
    rows.write_text("".join(json.dumps({"prompt": TEXT, "params": one}) + "\n" for one in params))
    done = run("-i", str(rows), "--set", f"tgt_lang={german}")
    assert done.status == 0, done.err
    for record, one in zip(done.records, params, strict=True):
        target = one.get("tgt_lang", german)
        assert record["token_ids"] == expected(translator, one.get("src_lang"), target)
        assert (record.get("src_lang"), record["tgt_lang"]) == (one.get("src_lang"), target)
    plain = run(TEXT)
    assert plain.records[0]["token_ids"] == expected(translator, None, None)
    assert "tgt_lang" not in plain.records[0]
    # the language is part of the prompt, and without it the text is another
    assert len({tuple(expected(translator, source, german)) for source in (english, french, german)}) > 1


def test_an_unknown_language_is_refused_with_the_known_ones(translator: Translator) -> None:
    folder, french = translator.folder, translator.languages[1]
    done = genctl("run", "-m", str(folder), "--src-lang", "klingon", TEXT)
    assert done.status == 2
    assert f"src_lang = klingon (flag --src-lang): {folder} has no language" in done.err
    assert "hint: its languages are " in done.err
    done = genctl("run", "-m", str(folder), "--tgt-lang", french, "--set", "forced_bos_token_id=5", TEXT)
    assert done.status == 2
    assert "cannot be combined with" in done.err


def test_a_tokenizer_without_languages_is_refused(tmp_path: Path) -> None:
    tiny("bart", tmp_path)
    for setting in ("src_lang", "tgt_lang"):
        done = genctl("run", "-m", str(tmp_path), "--set", f"{setting}=fr", TEXT)
        assert done.status == 2
        expected = f"{setting} = fr (--set {setting}): the tokenizer of {tmp_path} has no languages"
        assert done.err.splitlines()[0] == f"error: {expected}"
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": TEXT, "params": {"tgt_lang": "fr"}}) + "\n" + json.dumps({"prompt": TEXT}))
    done = genctl("run", "-m", str(tmp_path), "-i", str(rows), "-n", "3", "--format", "jsonl")
    assert done.status == 1
    assert "has no languages" in done.records[0]["error"]["message"]
    assert done.records[1]["finish_reason"]
