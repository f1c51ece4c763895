"""transformers' own `generate()`: padded batches, everything else as it comes."""

from __future__ import annotations

import time
from typing import Any

from .work import Ask, Ran, Setup, Unavailable, Work, checked

_PAGE = 256  # tokens, its default


class _First:
    """A streamer that only notes when the first new tokens came."""

    def __init__(self) -> None:
        self.calls = 0
        self.at: float | None = None

    def put(self, value: Any) -> None:
        self.calls += 1
        if self.calls == 2:  # the first call brings the prompt
            self.at = time.perf_counter()

    def end(self) -> None:
        pass


class Generate:
    """`AutoModel….from_pretrained` and `generate()`."""

    def __init__(self, setup: Setup) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

        if setup.dtype in ("int8", "int4"):
            raise Unavailable(f"generate() has no {setup.dtype} on a CPU without further packages")
        torch.set_num_threads(setup.threads)
        kind = AutoModelForSeq2SeqLM if setup.encoder_decoder else AutoModelForCausalLM
        dtype = getattr(torch, setup.dtype)
        self.model: Any = kind.from_pretrained(setup.folder("transformers"), dtype=dtype).eval().to(setup.device)
        self.encoder_decoder = setup.encoder_decoder
        self.device = setup.device

    def run(self, work: Work) -> Ran:
        """Do the work and time it: one `generate()` for each group of equal knobs."""
        tokens: list[tuple[int, ...]] = []
        first = None
        self._settle()
        began = time.perf_counter()
        for group in work.groups():
            made, first_at = self._group(group)
            tokens += made
            first = None if first_at is None else first_at - began
        self._settle()
        return checked(work, Ran(tuple(tokens), time.perf_counter() - began, first))

    def _group(self, group: tuple[Ask, ...]) -> tuple[list[tuple[int, ...]], float | None]:
        import torch
        from transformers import GenerationConfig

        longest = max(len(ask.prompt) for ask in group)
        pads = [longest - len(ask.prompt) for ask in group]
        ids = torch.tensor([[0] * pad + list(ask.prompt) for pad, ask in zip(pads, group, strict=True)])
        mask = (torch.arange(longest)[None] >= torch.tensor(pads)[:, None]).long()
        knobs = {key: value for key, value in group[0].knobs.items() if key not in ("seed", "sampler")}
        if group[0].samples:
            torch.manual_seed(group[0].knobs.get("seed", 0))
            knobs.setdefault("top_k", 50)  # genctl's default, and transformers' before version 5
        config = GenerationConfig(
            **knobs,
            max_new_tokens=max(ask.new for ask in group),
            pad_token_id=0,
            decoder_start_token_id=0 if self.encoder_decoder else None,
        )
        streamer = _First() if group[0].beams == 1 else None
        made = self.model.generate(
            ids.to(self.device), attention_mask=mask.to(self.device), generation_config=config, streamer=streamer
        )
        begin = 1 if self.encoder_decoder else longest
        rows = made[:, begin:].tolist()
        return [
            tuple(row[: ask.new]) for row, ask in zip(rows, group, strict=True)
        ], None if streamer is None else streamer.at

    def _settle(self) -> None:
        if self.device.startswith("cuda"):
            import torch

            torch.cuda.synchronize()


class Continuous(Generate):
    """transformers' own continuous batching: a manager with requests of their own lengths."""

    def run(self, work: Work) -> Ran:
        """Do the work and time it. Raises Unavailable for anything but greedy search."""
        from transformers import ContinuousBatchingConfig, GenerationConfig

        if any(ask.knobs for ask in work.asks) or self.encoder_decoder:
            raise Unavailable("continuous batching is compared with greedy search only")
        config = GenerationConfig(do_sample=False, pad_token_id=0, eos_token_id=-1)
        longest = max(len(ask.prompt) + ask.new for ask in work.asks)
        # left to itself it takes nine tenths of the memory, and on a CPU allocating that is most of its time
        pages = work.width * (longest // _PAGE + 2)
        batching = ContinuousBatchingConfig(
            page_size=_PAGE, num_blocks=pages, max_batch_tokens=max(512, longest), max_requests_per_batch=work.width
        )
        self._settle()
        began = time.perf_counter()
        results: dict[str, list[int]] = {}
        with self.model.continuous_batching_context_manager(
            generation_config=config, continuous_batching_config=batching, block=True, timeout=5
        ) as manager:
            for place, ask in enumerate(work.asks):
                manager.add_request(list(ask.prompt), request_id=str(place), max_new_tokens=ask.new)
            while len(results) < len(work.asks):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    results[result.request_id] = list(result.generated_tokens)
                elif result is None and not manager.is_running():
                    raise ValueError("its background thread ended before the work was done")
        self._settle()
        seconds = time.perf_counter() - began
        return checked(work, Ran(tuple(tuple(results[str(place)]) for place in range(len(work.asks))), seconds))
