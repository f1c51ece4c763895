"""One report from a run's events: the input of each pass, the cache after it, and its growth.

The report is plain JSON values (schema genctl/1); the terminal output is drawn from it. Bytes are measured
on the tensors in the cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from genctl import events
from genctl.events.history import LaneHistory
from genctl.io.records import SCHEMA

CROSS = "cross-attention"
STATE = "recurrent state"


@dataclass
class Measurement:
    """Collects the events of an observed run of at most `steps` passes after the prefill."""

    steps: int
    prompts: dict[str, LaneHistory] = field(default_factory=dict)
    passes: list[dict[str, Any]] = field(default_factory=list)  # as they are reported
    tokens: list[list[int]] = field(default_factory=list)  # of a single prompt: the tokens of each cached row
    model: str = ""
    _last: dict[str, int] = field(default_factory=dict)  # the newest pass of each prompt
    _after: dict[str, int] = field(default_factory=dict)  # passes of each prompt after its prefill

    def feed(self, event: events.Event) -> dict[str, Any] | None:
        """Take one event. Returns the report of a pass if the event is one."""
        if isinstance(event, events.CacheRead):
            return self._pass(event)
        if isinstance(event, (events.Began, events.Prefilled, events.Finished, events.Failed)):
            self.prompts[event.lane] = (self.prompts.get(event.lane) or LaneHistory(event.lane)).after(event)
        if isinstance(event, events.Began):
            self.model = event.model or self.model
            self._after[event.lane] = 0
        elif isinstance(event, events.Prefilled):
            self._prefilled(event)
        return None

    @property
    def failures(self) -> list[LaneHistory]:
        """The prompts that failed."""
        return [prompt for prompt in self.prompts.values() if prompt.failed is not None]

    def _prefilled(self, event: events.Prefilled) -> None:
        prompt = self.prompts[event.lane]
        if event.shared:  # the pass belongs to the other prompt
            others = (other for other in self.prompts.values() if other is not prompt)
            same = next((other.lane for other in others if _text(other) == _text(prompt)), "")
            if same in self._last:
                self._last[event.lane] = self._last[same]
        elif event.reused and event.lane in self._last:
            self._reused(self.passes[self._last[event.lane]])

    @staticmethod
    def _reused(entry: dict[str, Any]) -> None:
        """The source's keys and values came from a file: mark them as kept in this pass."""
        if entry["cross_attention"] is not None:
            entry["cross_attention"] = "kept"
            for layer in entry["layers"]:
                if layer["kind"] == CROSS:
                    layer["new"] = 0

    def _pass(self, event: events.CacheRead) -> dict[str, Any] | None:
        inputs = event.given
        assert inputs is not None
        lanes = list(dict.fromkeys(event.lanes or (event.lane,)))
        prefill = self.prompts[lanes[0]].prefilled is None
        if not prefill:
            if max(self._after[lane] for lane in lanes) >= self.steps:
                return None  # a search that scores a token before committing it needs one more pass
            for lane in lanes:
                self._after[lane] += 1
        places = {name: place for place, name in enumerate(self.prompts)}
        layers = [dict(layer) for layer in event.layers]
        total = sum(layer["bytes"] for layer in layers)
        before = {self._last[lane] for lane in lanes if lane in self._last}
        entry: dict[str, Any] = {
            "step": 0 if prefill else max(self._after[lane] for lane in lanes),
            "rows": [places[lane] for lane in event.lanes or (event.lane,)],
            **as_given(inputs),
            "layers": layers,
            "total_bytes": total,
            "reserved_bytes": event.reserved,
            "growth_bytes": total - sum(self.passes[place]["total_bytes"] for place in before),
            "reordered": list(event.reordered),
            "cross_attention": _cross(layers),
            "without_cache": None,
        }
        if layers and not positional(layers):
            entry["cache_position"] = []  # a state has no columns
        self._follow(entry)
        for lane in lanes:
            self._last[lane] = len(self.passes)
        self.passes.append(entry)
        return entry

    def _follow(self, entry: dict[str, Any]) -> None:
        """Keep the tokens of each cached row of a single prompt; -1 for tokens that were not read."""
        if len(self.prompts) > 1:
            return
        fed, past, moved = entry["input_ids"], entry["past_length"], entry["reordered"]
        held = self.tokens or [[]]
        old = [held[row] for row in moved] if moved else held if len(held) == len(fed) else [held[0]] * len(fed)
        self.tokens = [[*row[:past], *[-1] * (past - len(row)), *new] for row, new in zip(old, fed, strict=True)]

    def report(self, weights: int, cache: str, *, beside: Measurement | None = None) -> dict[str, Any]:
        """The measurement as one JSON object.

        `weights`: bytes of the model; `beside`: the same run without a cache.
        """
        if beside is not None:
            self._put_beside(beside)
        prompts = [prompt for prompt in self.prompts.values() if prompt.failed is None]
        final = last_passes(self.passes)
        layers = [layer for entry in final for layer in entry["layers"]]
        total = sum(entry["total_bytes"] for entry in final)
        rows = sum(len(entry["input_ids"]) for entry in final)
        report: dict[str, Any] = {"schema": SCHEMA, "model": self.model}
        if len(self.prompts) == 1 and prompts:
            report |= self._entry(prompts[0])
        else:
            report["prompts"] = [self._entry(prompt) for prompt in prompts]
        if self.failures:
            report["errors"] = [
                {"id": failure.lane, "error": {"code": failure.failed.code, "message": failure.failed.message}}
                for failure in self.failures
                if failure.failed is not None
            ]
        report |= {
            "cache": cache,
            "layers": layers,
            "total_bytes": total,
            "reserved_bytes": sum(entry["reserved_bytes"] for entry in final),
            "weights_bytes": weights,
            "bytes_per_token": per_token(self.passes),
            "bytes_per_row": divided(total, rows),
            "share_of_weights": total / weights if weights else None,
            "steps": self.passes,
        }
        if beside is not None:
            report["tokens_agree"] = self.written() == beside.written()
        return report

    def written(self) -> dict[str, list[tuple[int, ...]]]:
        """The new tokens of each prompt's sequences."""
        return {
            prompt.lane: [hypothesis.tokens for hypothesis in prompt.finished.hypotheses]
            for prompt in self.prompts.values()
            if prompt.finished is not None
        }

    def _entry(self, prompt: LaneHistory) -> dict[str, Any]:
        """The entry of a prompt."""
        began, read, finished = prompt.began, prompt.prefilled, prompt.finished
        return {
            "id": prompt.lane,
            "prompt": _text(prompt),
            "prompt_tokens": read.prompt_tokens if read else 0,
            "reused_tokens": read.reused if read else 0,
            "strategy": began.strategy if began else "",
            "seed": began.seed if began else None,
            "ended": None if finished is None else self._ended(finished),
            "sequences": [
                {"token_ids": list(hypothesis.tokens), "text": hypothesis.text, "finish_reason": hypothesis.reason}
                for hypothesis in (finished.hypotheses if finished else ())
            ],
        }

    def _ended(self, finished: events.Finished) -> dict[str, Any]:
        """The reason for the end of a prompt and the number of passes."""
        best, passes = finished.hypotheses[0] if finished.hypotheses else None, self._after[finished.lane]
        reason = best.reason if best else "length"
        if reason == "length" and passes >= self.steps:
            reason = "steps"
        stop = {"stop": best.cause} if best is not None and best.cause else {}
        return {"reason": reason, "steps": passes, **stop}

    def _put_beside(self, uncached: Measurement) -> None:
        names = ("input_ids", "position_ids", "attention_mask", "past_length")
        passes = {(entry["step"], tuple(entry["rows"])): entry for entry in uncached.passes}
        for entry in self.passes:
            match = passes.get((entry["step"], tuple(entry["rows"])))
            entry["without_cache"] = None if match is None else {name: match[name] for name in names}


def _text(prompt: LaneHistory) -> str:
    """The prompt as the model reads it."""
    return prompt.began.prompt if prompt.began else ""


def as_given(inputs: events.Given) -> dict[str, Any]:
    """The input of a pass as JSON values."""
    return {
        "input_ids": [list(row) for row in inputs.input_ids],
        "cache_position": list(inputs.cache_position),
        "position_ids": _rows(inputs.position_ids),
        "attention_mask": _rows(inputs.attention_mask),
        "past_length": inputs.past_length,
    }


def positional(layers: Iterable[dict[str, Any]]) -> bool:
    """Whether any layer keeps a column for each token."""
    return any(layer["kind"] not in (STATE, CROSS) for layer in layers)


def last_passes(passes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The newest pass, or all passes of that step if prompts were read, or run, separately."""
    last = max((entry["step"] for entry in passes), default=0)
    return [entry for entry in passes if entry["step"] == last]


def per_token(passes: Sequence[dict[str, Any]]) -> int | float | None:
    """Growth in bytes per new token and row, in the newest pass with the same rows as the pass before it.

    None if there is no such pass: after the prefill alone, or if rows changed at every step.
    """
    for number in range(len(passes) - 1, 0, -1):
        entry = passes[number]
        before = next((earlier for earlier in reversed(passes[:number]) if earlier["rows"] == entry["rows"]), None)
        if entry["step"] == 0 or before is None or before["step"] + 1 != entry["step"]:
            continue
        new = _reach(entry) - _reach(before)
        if not entry["cache_position"]:
            new = len(entry["input_ids"][0])
        if new > 0:
            return divided(entry["growth_bytes"], new * len(entry["rows"]))
    return None


def _reach(entry: dict[str, Any]) -> int:
    return int(entry["past_length"] + len(entry["input_ids"][0]))


def divided(total: int, count: int) -> int | float | None:
    """A share of bytes, a whole number where it is one; None of nothing."""
    if not count:
        return None
    return total // count if total % count == 0 else total / count


def _cross(layers: Iterable[dict[str, Any]]) -> str | None:
    new = [layer["new"] for layer in layers if layer["kind"] == CROSS]
    return None if not new else "computed" if any(new) else "kept"


def _rows(rows: tuple[tuple[int, ...], ...] | None) -> list[list[int]] | None:
    return None if rows is None else [list(row) for row in rows]
