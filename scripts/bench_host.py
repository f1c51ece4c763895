"""What a step costs besides the model: a model that answers at once, and everything that genctl does around it.

    python scripts/bench_host.py [--modes greedy "beam 5"] [--steps 64] [--vocabulary 50257] [--format md|json]

Microseconds per step of the loop, its processors, its search, events, captions, stops and the collected result, for
greedy search, sampling (top-k 50, top-p 0.9) and beam search (5 beams a prompt), at 1 and 16 rows (greedy: 128 too)
and after prompts of 16 to 4096 tokens. The time that the stand-in itself takes is subtracted. Times are CPU time of the
one thread that does all this, the least of several runs: other work on the machine only adds. Set OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, GPT2Config
from transformers.generation.utils import GenerationMixin

import genctl
from genctl import events
from genctl.decode.loop import decode
from genctl.decode.processors.build import ProcessorContext, build
from genctl.decode.stopping.row_text import RowText
from genctl.decode.types import Lane
from genctl.events.results import Collector
from genctl.models.text import Detokenizer
from genctl.params import Generation
from genctl.strategies.factory import choose
from genctl.transformers.runtime import TransformersRuntime

MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sample, top-k 50, top-p 0.9": {"do_sample": True, "top_k": 50, "top_p": 0.9},
    "sample, top-p 0.9": {"do_sample": True, "top_k": 0, "top_p": 0.9},
    "sample": {"do_sample": True, "top_k": 0},
    "sample, top-k 50, top-p 0.9, inverse-cdf": {"do_sample": True, "top_p": 0.9, "sampler": "inverse-cdf"},
    "beam 5": {"num_beams": 5},
}


class StandIn(GenerationMixin):  # type: ignore[misc]
    """A model that knows a few distributions by heart and writes one small column into the cache."""

    def __init__(self, vocabulary: int, known: int) -> None:
        self.config = GPT2Config(vocab_size=vocabulary, n_layer=1, n_head=1, n_embd=8, n_positions=1 << 20)
        self.device, self.dtype = torch.device("cpu"), torch.float32
        generator = torch.Generator().manual_seed(0)
        # Zipf's law, as a language model has it: nine tenths of the probability on ten to a few hundred tokens
        ranks = torch.stack([torch.randperm(vocabulary, generator=generator) for _ in range(7 * 128)]) + 1
        spread = 1.2 + 0.6 * torch.rand(7 * 128, 1, generator=generator)
        self.answers = (-spread * ranks.log()).view(7, 128, 1, vocabulary)
        self.answers[..., :known] += 3.0  # what the tokenizer can spell
        self.column = torch.zeros(128, 1, 1, 8)
        self.calls, self.seconds = 0, 0.0

    def modules(self) -> Iterator[Any]:
        """It has no layers."""
        return iter(())

    def _supports_default_dynamic_cache(self) -> bool:
        return True

    def get_output_embeddings(self) -> Any:
        return SimpleNamespace(weight=self.answers[0, 0, 0])

    def forward(
        self, input_ids: Tensor, past_key_values: Any = None, attention_mask: Any = None, position_ids: Any = None,
        use_cache: bool = True, logits_to_keep: int = 0, return_dict: bool = True,
    ) -> Any:  # fmt: skip
        began = time.thread_time()
        rows, fed = input_ids.shape
        column = self.column[:rows] if fed == 1 else self.column.new_zeros(rows, 1, fed, 8)
        past_key_values.update(column, column, 0)
        self.calls += 1
        answer = SimpleNamespace(logits=self.answers[self.calls % 7, :rows].clone())  # fresh, as a model leaves them
        self.seconds += time.thread_time() - began
        return answer

    __call__ = forward


def lanes(forward: TransformersRuntime, knobs: dict[str, Any], rows: int, prompt: int, steps: int) -> Iterator[Lane]:
    """As many prompts as it takes to have `rows` rows."""
    generation = Generation(**knobs)
    for number in range(max(1, rows // generation.num_beams)):
        tokens = tuple(torch.randint(0, 300, (prompt,), generator=torch.Generator().manual_seed(number)).tolist())
        material = ProcessorContext(generation, prompt, prompt + steps, forward.vocab_size)
        yield Lane(str(number), tokens, choose(generation), steps, processors=build(material), seed=number)


def per_step(
    forward: TransformersRuntime, tokenizer: Any, knobs: dict[str, Any], rows: int, prompt: int, steps: int
) -> float:
    """CPU seconds per step, the first eight not counted."""
    model = forward.model
    collector = Collector()
    text = RowText(Detokenizer(tokenizer))
    planned = [replace(lane, text=text) for lane in lanes(forward, knobs, rows, prompt, steps)]
    counted, began, aside, ended = 0, 0.0, 0.0, 0.0
    for event in decode(forward, planned, width=rows):
        assert not isinstance(event, events.Loading)
        if isinstance(event, events.Finished):  # what is left is said once a text
            ended = time.thread_time()
            break
        collector.feed(event)
        if isinstance(event, events.Stepped) and event.step == 8 and not began:
            counted, began, aside = model.calls, time.thread_time(), model.seconds
    spent: float = ended - began - (model.seconds - aside)
    return spent / (model.calls - counted)


def measured(
    forward: TransformersRuntime,
    tokenizer: Any,
    knobs: dict[str, Any],
    rows: int,
    lengths: list[int],
    steps: int,
    rounds: int,
) -> dict[int, int]:
    """Microseconds for each length of prompt: the least of several runs."""
    runs = {
        length: [per_step(forward, tokenizer, knobs, rows, length, steps) for _ in range(rounds)] for length in lengths
    }
    return {length: round(min(times) * 1e6) for length, times in runs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--lengths", type=int, nargs="+", default=[16, 256, 1024, 4096])
    parser.add_argument("--format", choices=("md", "json"), default="md")
    asked = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(Path(genctl.__file__).parent / "models" / "builtin" / "stories")
    forward = TransformersRuntime(StandIn(asked.vocabulary, len(tokenizer)))
    found = []
    for mode in asked.modes:
        knobs = MODES[mode]
        for wide in (5, 15) if "num_beams" in knobs else (1, 16, 128) if mode == "greedy" else (1, 16):
            found.append(
                (mode, wide, measured(forward, tokenizer, knobs, wide, asked.lengths, asked.steps, asked.rounds))
            )
    if asked.format == "json":
        rows_told = [{"mode": mode, "rows": rows, "us_per_step": times} for mode, rows, times in found]
        about = {"vocabulary": asked.vocabulary, "threads": torch.get_num_threads()}
        print(json.dumps({**about, "modes": rows_told}, indent=2))
        return
    print(f"µs per step, vocabulary {asked.vocabulary}, {torch.get_num_threads()} thread(s)\n")
    print("| mode | rows | " + " | ".join(f"after {length}" for length in asked.lengths) + " |")
    print("|---|--:|" + "--:|" * len(asked.lengths))
    for mode, rows, times in found:
        print(f"| {mode} | {rows} | " + " | ".join(map(str, times.values())) + " |")


if __name__ == "__main__":
    main()
