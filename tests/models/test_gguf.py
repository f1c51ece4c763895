"""GGUF files: unpacked, the tokens are those of transformers on the same file; damage is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from genctl.errors import ModelError
from genctl.models import libraries
from genctl.models.gguf import reader_of
from genctl.models.hub import load
from genctl.params import Runtime
from tests.cli.tool import genctl
from tests.models import converted
from tests.tiny import VOCABULARY, tiny
from tests.versions import needs_newest

pytest.importorskip("gguf")


def written(
    path: Path,
    *,
    arch: str = "qwen2",
    packed: bool = True,
    with_tokenizer: bool = True,
    more: Callable[[Any], object] = lambda writer: None,
    words: Mapping[int, str] | None = None,
) -> Path:
    """A tiny model with matrices in Q8_0 where their rows are whole blocks, as llama.cpp would write it.

    `more` adds to what is written, `words` are special tokens in place of others.
    """

    def change(metadata: dict[str, tuple[str, str, Any]]) -> None:
        metadata["tokenizer.ggml.pre"] = ("STRING", "", "qwen2")
        metadata[f"{arch}.vocab_size"] = ("UINT32", "", VOCABULARY)

    kind = "Q8_0" if packed else "F32"
    how: Any = {"vocabulary": with_tokenizer, "change": change, "more": more, "words": words}
    return converted.written(path, arch, kind=kind, **how)


def test_a_gguf_file_continues_as_with_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    path, ids = written(tmp_path / "tiny.gguf"), [5, 60, 250, 7]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt_ids": ids}))
    done = genctl(
        *("run", "-m", str(path), "-i", str(tmp_path / "rows.jsonl"), "--format", "jsonl"),
        *("--scores", "--max-new-tokens", "12", "--no-do-sample", "--dequantize"),
    )
    assert (done.status, done.err) == (0, ""), "a library's progress bar in a pipe?"
    model: Any = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name)
    prompt = torch.tensor([ids])
    theirs = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=12)
    assert [token["id"] for token in done.records[0]["tokens"]] == theirs[0, len(ids) :].tolist()


@pytest.mark.parametrize("runtime", ["native", "transformers"])
@pytest.mark.parametrize(
    ("more", "words", "ends"),
    [
        (lambda writer: None, {}, None),
        (lambda writer: writer.add_eot_token_id(250), {}, [2, 250]),
        (lambda writer: (writer.add_eot_token_id(250), writer.add_eom_token_id(60)), {}, [2, 250, 60]),
        (lambda writer: None, {250: "<|im_end|>", 60: "<|endoftext|>"}, [2, 60, 250]),
        (lambda writer: writer.add_eot_token_id(250), {250: "<|eot_id|>"}, [2, 250]),
        (lambda writer: None, {250: "<|end|>", 60: "<|return|>", 61: "<|call|>"}, [2, 60, 61]),
    ],
)
def test_every_end_token_of_a_gguf_file_ends_a_text(
    runtime: str, more: Any, words: dict[int, str], ends: list[int] | None, tmp_path: Path
) -> None:
    path = written(tmp_path / "tiny.gguf", more=more, words=words)
    found = load(Runtime(model=str(path), runtime=runtime), need_tokenizer=True)
    assert found.generation.values.get("eos_token_id") == ends
    row = json.dumps({"prompt_ids": [5, 60, 250, 7]})
    formats = ("--input-format", "jsonl", "--format", "jsonl")
    asked = ("run", "-m", str(path), "--runtime", runtime, "-n", "40", *formats)
    (record,) = genctl(*asked, stdin=row).records
    first = genctl(*asked, "--set", "eos_token_id=[]", stdin=row).records[0]["token_ids"]
    place = next((place for place, id in enumerate(first) if id in (ends or [2])), None)
    assert record["token_ids"] == first[: None if place is None else place + 1]


def test_gguf_files_that_cannot_be_used_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path, **options: Any) -> ModelError:
        with pytest.raises(ModelError) as said:
            load(Runtime(model=str(path), **options), need_tokenizer=True)
        return said.value

    (tmp_path / "text.gguf").write_text("GGML and more")
    assert "is no GGUF file" in refused(tmp_path / "text.gguf").message
    written(tmp_path / "whole.gguf")
    assert "holds no tokenizer" in refused(written(tmp_path / "mute.gguf", with_tokenizer=False)).message
    monkeypatch.setattr(libraries, "is_missing", lambda module: module == "gguf")
    missing = refused(tmp_path / "whole.gguf")
    assert "whole.gguf needs gguf, which is not installed" in missing.message
    assert missing.hint == 'pip install "genctl[gguf]"'


def test_a_plan_of_a_gguf_file_is_refused(tmp_path: Path) -> None:
    done = genctl("inspect-cache", "--plan", "--length", "100", "-m", str(written(tmp_path / "tiny.gguf")))
    assert done.status == 3, done.err
    assert "is a GGUF file, and a plan is made of a config.json" in done.err


def test_transformers_says_which_tensors_it_reads() -> None:
    reads = reader_of(tiny("llama"), "llama")
    assert reads is not None, "transformers.modeling_gguf_pytorch_utils.get_gguf_hf_weights_map has moved"
    assert all(map(reads, ("token_embd.weight", "output.weight", "blk.1.ffn_down.weight")))
    assert not any(map(reads, ("blk.2.ffn_down.weight", "blk.1.attn_q.bias", "rope_freqs.weight")))


@needs_newest("read every architecture with that reader")
def test_transformers_reports_the_tensors_that_another_reader_left_out() -> None:
    assert reader_of(object(), "lfm2") is None


def test_the_progress_bar_of_the_reader_is_replaced() -> None:
    from transformers import modeling_gguf_pytorch_utils as reader

    assert hasattr(reader, "tqdm"), "the reader of GGUF files has another progress bar"
    before = reader.tqdm
    with libraries.weights_bar(None, "x"):
        assert reader.tqdm is not before
    assert reader.tqdm is before
