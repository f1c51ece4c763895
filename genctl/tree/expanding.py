"""All continuations of a branch in the order of their joint probability, until they cover a mass: exact, not sampled.

Best-first search: of all texts that are not complete, the most probable is continued first. A text is never more
probable than what it begins with, so complete ones come out in order, and no continuation that is left out is more
probable than one that is found. A text after which the processors leave no token cannot become a continuation: it is a
dead end, of probability 0, and comes last.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from genctl.decode.processors import Processor, trace
from genctl.engines.protocol import Report
from genctl.errors import GenctlError, UsageError
from genctl.events import Token
from genctl.tree.distribution import processed_logprobs
from genctl.tree.explorer import Explorer

MOST = 1000  # texts that are continued, where nobody says how many
ROWS = 16  # in one pass
NEAR = math.log(10.0)  # siblings are read along that are no less probable than a tenth
BLOCK = 1024  # tokens after a text that are held at once


@dataclass(frozen=True, eq=False)
class ReadText:
    """A text that was read: a block of the tokens after it, the most probable first."""

    written: tuple[Token, ...]  # after the start
    total: float  # log-probability by the distribution that is expanded
    begin: int  # place of the block among all tokens
    ids: NDArray[np.int64]
    totals: NDArray[np.float64]  # log-probability of each token, after the processors
    logprobs: NDArray[np.float64]  # the model's own
    ranks: NDArray[np.int64]
    entropy: float
    more: bool  # whether further tokens are possible

    def child(self, place: int) -> tuple[tuple[Token, ...], float]:
        """The text with one more token, and its log-probability."""
        token = Token(
            int(self.ids[place]), float(self.logprobs[place]), rank=int(self.ranks[place]), entropy=self.entropy
        )
        return (*self.written, token), self.total + float(self.totals[place])


class BestFirst:
    """The texts after a node, best first."""

    def __init__(self, explorer: Explorer, start: int, depth: int, most: int) -> None:
        self.explorer, self.start, self.depth, self.most = explorer, start, depth, most
        resolved = explorer.resolved()
        request = explorer.request("", start, resolved, explorer.seed(explorer.tree.runs + 1))
        lane = explorer.session.planner.plan(request, Report()).lane
        self.processors: Sequence[Processor] = lane.processors
        if resolved.generation.ban:
            raise UsageError(
                "expand only goes forward, and ban takes back what was written", hint="leave out one of them"
            )
        self.resolved = resolved
        self.eos, self.logprobs = lane.eos, lane.strategy.traits.space == "logprobs"
        self.ends = {(id,) for id in lane.eos}
        self.read = 0  # texts that were continued
        self.exhausted = False  # `most` were
        self._read: dict[tuple[int, ...], ReadText] = {}  # read along with others, not needed yet
        self.dead: list[tuple[Token, ...]] = []  # texts that nothing can follow

    def texts(self) -> Iterator[tuple[tuple[Token, ...], float]]:
        """The complete texts and their log-probabilities, the most probable first; equal ones by their ids."""
        heap: list[tuple[float, tuple[int, ...], int, ReadText]] = []

        def push(text: ReadText, place: int) -> None:
            if not text.begin and not len(text.ids):
                self.dead.append(text.written)
            if place == len(text.ids) and text.more:
                text, place = self._continued(text), 0
            if place < len(text.ids):
                written, total = text.child(place)
                heapq.heappush(heap, (-total, tuple(token.id for token in written), place, text))

        push(self._block((), 0.0, self.explorer.branches.scores(self.start), 0), 0)
        self.read += 1
        while heap:
            _, ids, place, parent = heapq.heappop(heap)
            written, total = parent.child(place)
            if ids[-1] in self.eos or len(ids) == self.depth:
                yield written, total
            elif ids in self._read or self.read < self.most:
                push(self._text(ids, parent, place), 0)
            else:
                self.exhausted = True
                return
            push(parent, place + 1)

    def _text(self, ids: tuple[int, ...], parent: ReadText, place: int) -> ReadText:
        """Read a text, and siblings of it that are about as probable, in one pass."""
        if ids not in self._read:
            least = float(parent.totals[place]) - NEAR
            rows: list[tuple[tuple[int, ...], int]] = []
            for other in range(place, len(parent.ids)):
                sibling = (*ids[:-1], int(parent.ids[other]))
                if parent.totals[other] < least or len(rows) == min(ROWS, self.most - self.read):
                    break
                if sibling[-1] not in self.eos and sibling not in self._read:
                    rows.append((sibling, other))
            scores = self.explorer.branches.continuations(self.start, [sibling for sibling, _ in rows])
            self.read += len(rows)
            for (sibling, other), logits in zip(rows, scores, strict=True):
                self._read[sibling] = self._block(*parent.child(other), logits, 0)
        return self._read.pop(ids)

    def _continued(self, text: ReadText) -> ReadText:
        """The next block of tokens after a text, which is read again."""
        ids = tuple(token.id for token in text.written)
        branches = self.explorer.branches
        logits = branches.continuations(self.start, [ids])[0] if ids else branches.scores(self.start)
        return self._block(text.written, text.total, logits, text.begin + BLOCK)

    def _block(self, written: tuple[Token, ...], total: float, logits: torch.Tensor, begin: int) -> ReadText:
        device = self.explorer.session.forward.device
        given = [token.id for token in written]
        self.explorer.check_finite(logits, self.start, given, self.resolved)
        own = logits.double().log_softmax(-1)
        processed = own
        if self.processors:
            history = torch.tensor([[*self.explorer.tree.ids(self.start), *given]], device=device)
            scores = logits[None].to(device)
            scores = scores.log_softmax(-1) if self.logprobs else scores
            try:
                scores = trace.run_checked(self.processors, history, scores)
            except GenctlError:  # no token is left, or one processor at a time says what is wrong
                scores, _ = trace.run_traced(self.processors, history, scores, may_end=True)
            processed = processed_logprobs(scores[0]).cpu()
        values = processed.numpy()
        possible = int((values > -np.inf).sum())
        order = np.argsort(-values, kind="stable")[begin : min(begin + BLOCK, possible)]
        model = own.numpy()
        ranks = len(model) - np.searchsorted(np.sort(model), model[order], side="right") + 1
        entropy = float(torch.special.entr(own.exp()).numpy().sum())
        more = begin + len(order) < possible
        return ReadText(written, total, begin, order, values[order], model[order], ranks, entropy, more)
