"""Write `tests/goldens/gguf_metadata.json`: the metadata that llama.cpp's converter writes for tiny checkpoints.

    LLAMA_CPP=/path/to/llama.cpp PYTHONPATH=. python scripts/make_goldens_converter.py

The tensors of `tests/models/converted.py` are compared with the converter's, bit by bit.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.models import converted
from tests.tiny import CONTEXT, tokenizer

ROOT = os.environ["LLAMA_CPP"]
LISTS = ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.merges")
# Fields that published checkpoints have in config.json, but transformers does not write.
FIELDS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_ctx": CONTEXT},
    "cohere2": {"rotary_pct": 1.0},
    "gpt_neox": {"rotary_pct": 0.25, "rotary_emb_base": 10000},
    "mpt": {"architectures": ["MPTForCausalLM"]},
}


def main() -> None:
    sys.path[:0] = [ROOT, f"{ROOT}/gguf-py"]
    import conversion
    import gguf
    import numpy
    from conversion.base import ModelBase, TextModel

    conversion.load_all_models()
    read = ModelBase.load_hparams

    def fields(folder: Path, *arguments: Any, **options: Any) -> dict[str, Any]:
        found = read(folder, *arguments, **options)
        found |= FIELDS.get(found["model_type"], {})
        if found["model_type"] == "falcon" and not found["new_decoder_architecture"]:
            found["num_kv_heads"] = 1
        return found

    def vocabulary(model: Any) -> None:
        held = json.loads(tokenizer().backend_tokenizer.to_str())["model"]
        model.gguf_writer.add_tokenizer_model("gpt2")
        model.gguf_writer.add_tokenizer_pre("llama-bpe")
        model.gguf_writer.add_token_list(sorted(held["vocab"], key=held["vocab"].get))
        special = gguf.SpecialVocab(model.dir_model, load_merges=True, n_vocab=len(held["vocab"]))
        special.add_to_gguf(model.gguf_writer)

    ModelBase.load_hparams = staticmethod(fields)
    logging.disable(logging.CRITICAL)
    found: dict[str, list[Any]] = {}
    for name in (*converted.CASES, *converted.OTHERS):
        with tempfile.TemporaryDirectory() as temporary:
            folder, path = Path(temporary) / "tiny", Path(temporary) / "tiny.gguf"
            converted.model(name).save_pretrained(folder)
            tokenizer().save_pretrained(folder)
            held = fields(folder, False)
            kind = conversion.get_model_class(held["architectures"][0])
            kind.set_vocab = vocabulary
            made: TextModel = kind(folder, gguf.LlamaFileType.ALL_F32, path)
            made.write()
            reader = gguf.GGUFReader(path)
            entries = []
            for key, field in reader.fields.items():
                if not key.startswith("GGUF.") and key not in LISTS:
                    items = field.types[1].name if len(field.types) > 1 else ""
                    entries.append([key, field.types[0].name, items, field.contents()])
            found[name] = entries
            converted.GOLDEN.write_text(json.dumps(found))
            theirs = {tensor.name: tensor.data for tensor in reader.tensors}
            ours = dict(converted.tensors(name))
            assert theirs.keys() == ours.keys(), theirs.keys() ^ ours.keys()
            for tensor, numbers in ours.items():
                assert numpy.array_equal(theirs[tensor].reshape(-1), numbers.numpy().reshape(-1)), (name, tensor)
    lines = (f" {json.dumps(name)}: {json.dumps(entries)}" for name, entries in found.items())
    converted.GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
