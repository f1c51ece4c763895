"""Plans on the screen, at 80 and 120 columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from rich.cells import cell_len

from genctl.commands.inspect.plan import plan
from genctl.commands.inspect.report import plan_lines
from genctl.commands.options import memory_bytes
from genctl.params import Generation, Runtime


def screen(config: Any, folder: Path, width: int | None, generation: Generation, memory: str, **asked: Any) -> str:
    config.save_pretrained(folder)
    runtime = Runtime(model=str(folder), device="cuda")
    made = plan(runtime, generation, memory=memory_bytes(memory), **asked)
    lines = [line.plain for line in plan_lines({**made, "model": folder.name}, width)]
    assert width is None or max(map(cell_len, lines)) <= width
    return "\n".join(lines) + "\n"


def llama() -> Any:
    """The dimensions of a model with 8 B weights."""
    return transformers.LlamaConfig(
        num_hidden_layers=32, hidden_size=4096, num_attention_heads=32, num_key_value_heads=8,
        intermediate_size=14336, vocab_size=128256, max_position_embeddings=8192, dtype="bfloat16",
    )  # fmt: skip


def gemma() -> Any:
    """Sliding-window and full layers, alternating."""
    return transformers.Gemma3TextConfig(num_hidden_layers=12, sliding_window=512, dtype="bfloat16")


LLAMA_80 = """\
── llama · plan · 4 prompts · 4,096 tokens ─────────────────────────────────────
layer  kind    dtype     device          bytes  shape
0-31   static  bfloat16  cuda    2,147,483,648  [batch 4, heads 8, tokens 4096,
                                                head_dim 128], 32 × 67,108,864,
                                                4096 of 4096 filled
cache     2,147,483,648 bytes (2.0 GiB) · 536,870,912 bytes for each of 4 rows ·
          13.4% of the weights (15.0 GiB)
growth    131,072 bytes for each new token of each row
weights   16,060,522,496 bytes (15.0 GiB) · bfloat16
memory    25,769,803,776 bytes (24.0 GiB) · fits, 7.0 GiB left
longest   8,192 tokens in 4 rows · the model's context
largest   18 prompts of 4,096 tokens
          activations and the framework's own memory are not counted
"""

GEMMA_80 = """\
── gemma · plan · 2 prompts · 4,096 tokens ─────────────────────────────────────
layer  kind            dtype     device       bytes  shape
0-4    sliding window  bfloat16  cuda    83,722,240  [batch 8, heads 4, tokens
                                                     511, head_dim 256], 5 ×
                                                     16,744,448, window 512
5      quantised       int8      cuda    68,157,440  [batch 8, heads 4, tokens
                                                     4096, head_dim 256]
6-10   sliding window  bfloat16  cuda    83,722,240  [batch 8, heads 4, tokens
                                                     511, head_dim 256], 5 ×
                                                     16,744,448, window 512
11     quantised       int8      cuda    68,157,440  [batch 8, heads 4, tokens
                                                     4096, head_dim 256]
cache     303,759,360 bytes (289.7 MiB) · 37,969,920 bytes for each of 8 rows ·
          9.9% of the weights (2.9 GiB)
reserved  392,855,040 bytes, room for later tokens included
growth    4,160 bytes for each new token of each row
weights   3,077,293,056 bytes (2.9 GiB) · bfloat16
memory    1,000,000,000 bytes (953.7 MiB) · does not fit: the weights alone need
          1.9 GiB more
longest   0 tokens in 8 rows
largest   0 prompts of 4,096 tokens
          activations and the framework's own memory are not counted
"""


def test_a_plan_that_fits_at_80_columns(tmp_path: Path) -> None:
    assert screen(llama(), tmp_path / "llama", 80, Generation(), "24GiB", batch=4, length=4096) == LLAMA_80


def test_a_plan_that_does_not_fit_at_80_columns(tmp_path: Path) -> None:
    asked = Generation(num_beams=4, cache_implementation="quantized")
    assert screen(gemma(), tmp_path / "gemma", 80, asked, "1 GB", batch=2, length=4096) == GEMMA_80


@pytest.mark.parametrize("width", [120, None])
def test_a_wide_page_breaks_no_line(tmp_path: Path, width: int | None) -> None:
    asked = Generation(num_beams=4, cache_implementation="quantized")
    made = screen(gemma(), tmp_path / "gemma", width, asked, "1 GB", batch=2, length=4096)
    whole = "memory    1,000,000,000 bytes (953.7 MiB) · does not fit: the weights alone need 1.9 GiB more\n"
    assert whole in made
    assert made.count("window 512\n") == 2


def test_a_narrow_page_cuts_nothing_but_the_table(tmp_path: Path) -> None:
    made = screen(llama(), tmp_path / "llama", 40, Generation(), "24GiB", batch=4, length=4096)
    flat = " ".join(made.split())
    assert "activations and the framework's own memory are not counted" in flat
    assert "8,192 tokens in 4 rows · the model's context" in flat
