"""A model for the stand-in server: answers are computed with a local checkpoint."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from genctl.decode.runtime import Pass
from genctl.models.text import detokenizer
from genctl.parity.sides import LocalSide
from tests.engines.server.stand_in import Body
from tests.parity.sides import side

STORIES = "builtin:stories"
Change = Callable[[Tensor], Tensor]


@cache
def served(dtype: str = "float32") -> LocalSide:
    return side(STORIES, dtype=dtype)


class Model:
    """Answers as a server with this checkpoint would. `change` is applied to the logits f32 [N, V] of every answer."""

    def __init__(self, change: Change = lambda logits: logits, dtype: str = "float32", most: int = 20) -> None:
        session = served(dtype).session
        self.forward, self.tokenizer = session.forward, session.loaded.tokenizer
        self.change, self.most, self.lock = change, most, threading.Lock()
        self.piece = detokenizer(self.tokenizer).piece

    def logprobs(self, ids: list[int]) -> Tensor:
        logits = self.forward(Pass(torch.tensor([ids]), None, first=True, keep=len(ids))).logits[0]
        return self.change(logits.float().clone()).double().log_softmax(-1)

    def __call__(self, body: Body) -> Body:
        with self.lock, torch.inference_mode():
            return self.answer(body)

    def answer(self, body: Body) -> Body:
        prompt = body["prompt"]
        ids = list(self.tokenizer(prompt)["input_ids"]) if isinstance(prompt, str) else list(prompt)
        echo, begin = body.get("echo", False), len(ids)
        for _ in range(body["max_tokens"]):
            ids.append(int(self.logprobs(ids)[-1].argmax()))
        rows = [None, *self.logprobs(ids)[:-1]]
        first = 0 if echo else begin
        told = [(self.piece(id), row, id) for id, row in zip(ids, rows, strict=True)][first:]
        top = min(body.get("logprobs") or 0, self.most)
        best = [None if row is None else row.topk(max(top, 1)) for _, row, _ in told]
        logprobs = {
            "tokens": [text for text, _, _ in told],
            "token_logprobs": [None if row is None else float(row[id]) for _, row, id in told],
            "top_logprobs": [
                None if one is None else {self.piece(int(id)): float(v) for v, id in zip(*one, strict=True)}
                for one in best
            ],
        }
        text = "".join(logprobs["tokens"])
        return {"choices": [{"index": 0, "text": text, "finish_reason": "length", "logprobs": logprobs}]}
