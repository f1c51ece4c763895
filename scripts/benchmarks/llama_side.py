"""llama.cpp, through llama-cpp-python's own binding of its C interface: batches of several sequences, greedy search."""

from __future__ import annotations

import time
from importlib import import_module
from typing import Any

from .work import Ask, Ran, Setup, Unavailable, Work, checked

_AT_ONCE = 2048  # prompt tokens handed over in one call


class LlamaCpp:
    """A model and, for each shape of work, a context that is kept: the cache is cleared before each prompt."""

    def __init__(self, setup: Setup) -> None:
        if setup.encoder_decoder:
            raise Unavailable("the checkpoint is not written in llama.cpp's form")
        llama_cpp: Any = import_module("llama_cpp")
        self.api: Any = llama_cpp
        self.threads = setup.threads
        self.quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self.quiet, None)
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 999 if setup.device.startswith("cuda") else 0
        path = next(iter(setup.folders.values())) / "model.gguf"
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not self.model:
            raise Unavailable(f"llama.cpp does not read {path.name}")
        self.vocabulary: int = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.contexts: dict[tuple[int, int], Any] = {}

    def run(self, work: Work) -> Ran:
        """Do the work and time it: one batch of sequences for each group. Raises Unavailable for all but greedy."""
        if any(ask.knobs for ask in work.asks):
            raise Unavailable("llama.cpp is compared with greedy search only")
        groups = list(work.groups())
        context = self._context(
            max(len(group) for group in groups),
            max(len(ask.prompt) + ask.new for ask in work.asks),
        )
        tokens: list[tuple[int, ...]] = []
        first = None
        began = time.perf_counter()
        for group in groups:
            made, first_at = self._group(context, group)
            tokens += made
            first = first_at - began
        return checked(work, Ran(tuple(tokens), time.perf_counter() - began, first))

    def _context(self, rows: int, cells: int) -> Any:
        """A context with room for `rows` sequences of `cells` tokens each."""
        cells = -(-cells // 256) * 256
        if (rows, cells) not in self.contexts:
            params = self.api.llama_context_default_params()
            params.n_ctx, params.n_seq_max = rows * cells, rows
            params.n_batch = _AT_ONCE
            params.n_threads = params.n_threads_batch = self.threads
            for held in self.contexts.values():
                self.api.llama_free(held)
            self.contexts = {(rows, cells): self.api.llama_init_from_model(self.model, params)}
        return self.contexts[rows, cells]

    def _group(self, context: Any, group: tuple[Ask, ...]) -> tuple[list[tuple[int, ...]], float]:
        api = self.api
        api.llama_memory_clear(api.llama_get_memory(context), True)
        batch = api.llama_batch_init(_AT_ONCE, 0, len(group))
        newest = [0] * len(group)
        written: list[list[int]] = [[] for _ in group]
        try:
            queue = [
                (row, at, token, at == len(ask.prompt) - 1)
                for row, ask in enumerate(group)
                for at, token in enumerate(ask.prompt)
            ]
            for begin in range(0, len(queue), _AT_ONCE):
                for row, token in self._decode(context, batch, queue[begin : begin + _AT_ONCE]):
                    newest[row] = token
                    written[row].append(token)
            first = time.perf_counter()
            while True:
                live = [row for row, ask in enumerate(group) if len(written[row]) < ask.new]
                if not live:
                    break
                # the newest token stands behind the prompt and the tokens before it
                fed = [(row, len(group[row].prompt) + len(written[row]) - 1, newest[row], True) for row in live]
                for row, token in self._decode(context, batch, fed):
                    newest[row] = token
                    written[row].append(token)
        finally:
            api.llama_batch_free(batch)
        return [tuple(row) for row in written], first

    def _decode(self, context: Any, batch: Any, fed: list[tuple[int, int, int, bool]]) -> list[tuple[int, int]]:
        """One pass over (row, position, token, whether its logits are wanted); the best token of each that are."""
        import numpy

        batch.n_tokens = len(fed)
        for place, (row, at, token, wanted) in enumerate(fed):
            batch.token[place], batch.pos[place] = token, at
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, row
            batch.logits[place] = wanted
        status = self.api.llama_decode(context, batch)
        if status != 0:
            raise ValueError(f"llama_decode answered {status}")
        best = []
        for place, (row, _, _, wanted) in enumerate(fed):
            if wanted:
                logits = self.api.llama_get_logits_ith(context, place)
                best.append((row, int(numpy.ctypeslib.as_array(logits, (self.vocabulary,)).argmax())))
        return best


class Drafted:
    """llama-cpp-python's prompt lookup. Its texts are compared with those that it writes without drafts."""

    def __init__(self, setup: Setup) -> None:
        api: Any = import_module("llama_cpp")
        lookup: Any = import_module("llama_cpp.llama_speculative")
        path = next(iter(setup.folders.values())) / "model.gguf"
        common = {"model_path": str(path), "n_ctx": 1024, "n_threads": setup.threads, "verbose": False}
        self.plain = api.Llama(**common)
        self.drafting = api.Llama(
            **common, logits_all=True, draft_model=lookup.LlamaPromptLookupDecoding(num_pred_tokens=10)
        )
        self.known: tuple[Work, tuple[tuple[int, ...], ...]] | None = None  # what was written without drafts

    def run(self, work: Work) -> Ran:
        """Do the work and time it, one prompt after another. Raises Unavailable for all but greedy."""
        if any(set(ask.knobs) - {"draft"} for ask in work.asks):
            raise Unavailable("llama.cpp is compared with greedy search only")
        seconds = first_s = 0.0
        found = []
        for ask in work.asks:
            tokens, times = self._written(self.drafting, ask)
            found.append(tokens)
            seconds, first_s = seconds + times[-1], first_s + times[0]
        if not self.known or self.known[0] != work:
            self.known = (work, tuple(self._written(self.plain, ask)[0] for ask in work.asks))
        return checked(work, Ran(tuple(found), seconds, first_s, undrafted=self.known[1]))

    def _written(self, llama: Any, ask: Ask) -> tuple[tuple[int, ...], list[float]]:
        """The tokens, and the seconds until each of them was there."""
        began, times, found = time.perf_counter(), [], []
        llama.reset()
        for token in llama.generate(list(ask.prompt), temp=0.0, repeat_penalty=1.0):
            found.append(token)
            times.append(time.perf_counter() - began)
            if len(found) == ask.new:
                break
        return tuple(found), times
