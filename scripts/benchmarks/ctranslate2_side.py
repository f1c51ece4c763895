"""CTranslate2: the same checkpoint, converted."""

from __future__ import annotations

import json
import time
from importlib import import_module
from typing import Any

from .work import Ask, Ran, Setup, Unavailable, Work, checked


class CTranslate2:
    """A `Generator`, or a `Translator` for an encoder-decoder; one worker with all threads."""

    def __init__(self, setup: Setup) -> None:
        ctranslate2: Any = import_module("ctranslate2")
        kind = {"int8": "int8_float32"}.get(setup.dtype, setup.dtype)
        device = setup.device.partition(":")[0]
        if kind not in ctranslate2.get_supported_compute_types(device):
            raise Unavailable(f"CTranslate2 does not compute in {setup.dtype} here")
        folder = setup.folder("ctranslate2")
        self.encoder_decoder = setup.encoder_decoder
        make = ctranslate2.Translator if setup.encoder_decoder else ctranslate2.Generator
        self.model: Any = make(
            str(folder), device=device, compute_type=kind, inter_threads=1, intra_threads=setup.threads
        )
        words = folder / ("shared_vocabulary.json" if setup.encoder_decoder else "vocabulary.json")
        self.words: list[str] = json.loads(words.read_text(encoding="utf-8"))
        self.ids = {word: number for number, word in enumerate(self.words)}

    def run(self, work: Work) -> Ran:
        """Do the work and time it: one call for each group of equal knobs."""
        tokens: list[tuple[int, ...]] = []
        first: list[float] = []
        began = time.perf_counter()
        for group in work.groups():
            tokens += self._group(group, lambda: first.append(time.perf_counter() - began))
        seconds = time.perf_counter() - began
        return checked(work, Ran(tuple(tokens), seconds, first[-1] if first else None))

    def _group(self, group: tuple[Ask, ...], heard: Any) -> list[tuple[int, ...]]:
        prompts = [[self.words[token] for token in ask.prompt] for ask in group]
        longest = max(ask.new for ask in group)
        options = self._options(group[0])
        if options["beam_size"] == 1:
            waiting = set(range(len(group)))

            def note(step: Any) -> bool:
                if waiting:
                    waiting.discard(step.batch_id)
                    if not waiting:
                        heard()
                return False

            options["callback"] = note
        if self.encoder_decoder:
            made = self.model.translate_batch(
                prompts, max_decoding_length=longest, min_decoding_length=longest, max_input_length=0, **options
            )
            rows = [[self.ids[word] for word in result.hypotheses[0]] for result in made]
        else:
            made = self.model.generate_batch(
                prompts, max_length=longest, min_length=longest, include_prompt_in_result=False, **options
            )
            rows = [result.sequences_ids[0] for result in made]
        return [tuple(row[: ask.new]) for row, ask in zip(rows, group, strict=True)]

    def _options(self, ask: Ask) -> dict[str, Any]:
        """Its names for our knobs. Raises Unavailable for those that it does not have."""
        options: dict[str, Any] = {"beam_size": ask.beams}
        knobs = {key: value for key, value in ask.knobs.items() if key not in ("num_beams", "seed", "sampler")}
        if knobs.pop("do_sample", False):
            options["sampling_topk"] = knobs.pop("top_k", 50)
            options["sampling_topp"] = knobs.pop("top_p", 1.0)
            options["sampling_temperature"] = knobs.pop("temperature", 1.0)
        if "repetition_penalty" in knobs:
            options["repetition_penalty"] = knobs.pop("repetition_penalty")
        if knobs:
            raise Unavailable(f"CTranslate2 has no {', '.join(sorted(knobs))}")
        return options
