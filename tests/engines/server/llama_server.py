"""llama.cpp's own server on the built-in checkpoint `stories`, written as a GGUF file with its tokenizer."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

STORIES = Path(__file__).resolve().parents[3] / "genctl" / "models" / "builtin" / "stories"
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(path: Path) -> None:
    """The checkpoint in float32, with its byte-level BPE."""
    import numpy
    from safetensors.torch import load_file

    gguf: Any = import_module("gguf")
    config = json.loads((STORIES / "config.json").read_text())
    tokenizer = json.loads((STORIES / "tokenizer.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    special = {entry["content"] for entry in tokenizer["added_tokens"]}
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(True)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, tensor in load_file(STORIES / "model.safetensors").items():
        values = tensor.float().numpy()
        for part, count in heads.items():
            if f".{part}." in name:  # their rotary embedding pairs neighbours, ours pairs halves
                inner = values.shape[0] // count // 2
                values = values.reshape(count, 2, inner, -1).swapaxes(1, 2).reshape(values.shape)
        writer.add_tensor(_tensor_name(name), numpy.ascontiguousarray(values, dtype=numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensor_name(name: str) -> str:
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    _, _, number, *parts = name.split(".")
    return f"blk.{number}.{NAMES['.'.join(parts[:-1])]}.{parts[-1]}"


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The address of a server that has read the checkpoint."""
    write_gguf(folder / "stories.gguf")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--model", "stories.gguf", "--model_alias", "stories", "--port", str(port), "--n_ctx", "512"]
    words += ["--logits_all", "true", "--type_k", "0", "--type_v", "0", "--n_threads", "1", "--chat_format", "chatml"]
    log = (folder / "server.log").open("wb")
    with log, subprocess.Popen(
        [sys.executable, "-m", "llama_cpp.server", *words], cwd=folder, stdout=log, stderr=log
    ) as server:  # fmt: skip
        try:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline and server.poll() is None:
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5).close()
                    break
                time.sleep(0.1)
            yield f"openai:http://127.0.0.1:{port}"
        finally:
            server.kill()
