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

from scripts import make_traces

STORIES = make_traces.BUILTIN / "stories"


def write_gguf(path: Path) -> None:
    """The checkpoint in float32, with its byte-level BPE."""
    gguf: Any = import_module("gguf")
    tokenizer = json.loads((STORIES / "tokenizer.json").read_text())
    special = {entry["content"] for entry in tokenizer["added_tokens"]}
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)

    def describe(writer: Any) -> None:
        kinds = gguf.TokenType
        writer.add_file_type(gguf.LlamaFileType.ALL_F32)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(tokens)
        writer.add_token_types([kinds.CONTROL if token in special else kinds.NORMAL for token in tokens])
        writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_add_bos_token(True)

    make_traces.gguf(STORIES, path, "F32", describe)


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
