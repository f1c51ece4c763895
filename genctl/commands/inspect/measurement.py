"""A report from a run's events: the input of each pass, the cache after it, and its growth.

The report is plain JSON values (schema genctl/1); the terminal output is made from it. Bytes are measured
on the tensors in the cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from genctl import events
from genctl.events.history import LaneHistory
from genctl.io.records import SCHEMA

CROSS = "cross-attention"
STATE = "recurrent state"
INPUTS = ("input_ids", "position_ids", "attention_mask", "past_length")  # of a pass, shown with and without a cache


@dataclass
class Measurement:
    """Collects the events of an observed run of at most `steps` passes after the prefill."""

    steps: int
    prompts: dict[str, LaneHistory] = field(default_factory=dict)
    passes: list[dict[str, Any]] = field(default_factory=list)  # in the form of the report
    _last: dict[str, int] = field(default_factory=dict)  # index of the newest pass of each prompt
    _after: Counter[str] = field(default_factory=Counter)  # passes of each prompt after its prefill

    def feed(self, event: events.Event) -> None:
        """Process one event."""
        if isinstance(event, events.CacheRead):
            self._pass(event)
        elif isinstance(event, (events.Began, events.Prefilled, events.Finished, events.Failed)):
            self.prompts[event.lane] = (self.prompts.get(event.lane) or LaneHistory(event.lane)).after(event)
        if isinstance(event, events.Prefilled) and event.reused and event.lane in self._last:
            entry = self.passes[self._last[event.lane]]
            if entry["cross_attention"] is not None:  # the source's keys and values came from a prompt cache
                entry["cross_attention"] = "kept"
                for layer in entry["layers"]:
                    layer["new"] = 0 if layer["kind"] == CROSS else layer["new"]

    def _pass(self, event: events.CacheRead) -> None:
        """Add the entry of a pass, except the extra one in which a search scores its last token."""
        given = event.given
        assert given is not None
        rows = event.lanes or (event.lane,)
        lanes = list(dict.fromkeys(rows))
        step = 0
        if self.prompts[lanes[0]].prefilled is not None:
            step = max(self._after[lane] for lane in lanes) + 1
            if step > self.steps:
                return
            self._after.update(lanes)
        places = list(self.prompts)
        layers = [dict(layer) for layer in event.layers]
        total = sum(layer["bytes"] for layer in layers)
        before = {self._last[lane] for lane in lanes if lane in self._last}
        cross = [layer["new"] for layer in layers if layer["kind"] == CROSS]
        has_columns = not layers or any(layer["kind"] not in (STATE, CROSS) for layer in layers)
        entry: dict[str, Any] = {
            "step": step,
            "rows": [places.index(lane) for lane in rows],
            "input_ids": [list(row) for row in given.input_ids],
            "cache_position": list(given.cache_position) if has_columns else [],  # a state has no columns
            "position_ids": None if given.position_ids is None else [list(row) for row in given.position_ids],
            "attention_mask": None if given.attention_mask is None else [list(row) for row in given.attention_mask],
            "past_length": given.past_length,
            "layers": layers,
            "total_bytes": total,
            "reserved_bytes": event.reserved,
            "growth_bytes": total - sum(self.passes[place]["total_bytes"] for place in before),
            "reordered": list(event.reordered),
            "cross_attention": None if not cross else "computed" if any(cross) else "kept",
            "without_cache": None,
        }
        self._last |= dict.fromkeys(lanes, len(self.passes))
        self.passes.append(entry)

    @property
    def failures(self) -> list[events.Failed]:
        """The `Failed` event of each failed prompt."""
        return [prompt.failed for prompt in self.prompts.values() if prompt.failed is not None]

    def written(self) -> dict[str, list[tuple[int, ...]]]:
        """The new tokens of each prompt's sequences."""
        finished = [prompt.finished for prompt in self.prompts.values() if prompt.finished is not None]
        return {one.lane: [hypothesis.tokens for hypothesis in one.hypotheses] for one in finished}

    def report(self, weights: int, cache: str, *, beside: Measurement | None = None) -> dict[str, Any]:
        """The measurement as one JSON object.

        `weights`: bytes of the model; `cache`: the form of the cache; `beside`: the same run without a cache.
        """
        if beside is not None:
            others = {(entry["step"], tuple(entry["rows"])): entry for entry in beside.passes}
            for entry in self.passes:
                other = others.get((entry["step"], tuple(entry["rows"])))
                entry["without_cache"] = None if other is None else {name: other[name] for name in INPUTS}
        prompts = [self._entry(prompt) for prompt in self.prompts.values() if prompt.failed is None]
        last = max((entry["step"] for entry in self.passes), default=0)
        final = [entry for entry in self.passes if entry["step"] == last]  # several if prompts ran separately
        total = sum(entry["total_bytes"] for entry in final)
        models = [prompt.began.model for prompt in self.prompts.values() if prompt.began and prompt.began.model]
        report: dict[str, Any] = {"schema": SCHEMA, "model": models[-1] if models else ""}
        report |= prompts[0] if prompts and len(self.prompts) == 1 else {"prompts": prompts}
        errors = [{"id": one.lane, "error": {"code": one.code, "message": one.message}} for one in self.failures]
        report |= {"errors": errors} if errors else {}
        report |= {
            "cache": cache,
            "layers": [layer for entry in final for layer in entry["layers"]],
            "total_bytes": total,
            "reserved_bytes": sum(entry["reserved_bytes"] for entry in final),
            "weights_bytes": weights,
            "bytes_per_token": per_token(self.passes),
            "bytes_per_row": divided(total, sum(len(entry["input_ids"]) for entry in final)),
            "share_of_weights": total / weights if weights else None,
            "steps": self.passes,
        }
        return report if beside is None else report | {"tokens_agree": self.written() == beside.written()}

    def _entry(self, prompt: LaneHistory) -> dict[str, Any]:
        """The entry of a prompt: its strategy, why it ended, and its sequences."""
        began, read, finished = prompt.began, prompt.prefilled, prompt.finished
        hypotheses = finished.hypotheses if finished else ()
        ended = None
        if finished is not None:
            passes, reason = self._after[prompt.lane], hypotheses[0].reason if hypotheses else "length"
            ended = {
                "reason": "steps" if reason == "length" and passes >= self.steps else reason,
                "steps": passes,
                **({"stop": hypotheses[0].cause} if hypotheses and hypotheses[0].cause else {}),
            }
        return {
            "id": prompt.lane,
            "prompt": began.prompt if began else "",
            "prompt_tokens": read.prompt_tokens if read else 0,
            "reused_tokens": read.reused if read else 0,
            "strategy": began.strategy if began else "",
            "seed": began.seed if began else None,
            "ended": ended,
            "sequences": [
                {"token_ids": list(one.tokens), "text": one.text, "finish_reason": one.reason} for one in hypotheses
            ],
        }


def per_token(passes: Sequence[dict[str, Any]]) -> int | float | None:
    """Growth in bytes per new token and row, in the newest pass with the same rows as the previous step.

    None if there is no such pass: after the prefill alone, or if rows changed at every step.
    """
    decoded = {(entry["step"], *entry["rows"]) for entry in passes}
    for entry in reversed(passes):
        if (entry["step"] - 1, *entry["rows"]) in decoded:
            return divided(entry["growth_bytes"], len(entry["input_ids"][0]) * len(entry["rows"]))
    return None


def divided(total: int, count: int) -> int | float | None:
    """`total` / `count`, as an integer if it is whole; None if `count` is 0."""
    if not count:
        return None
    return total // count if total % count == 0 else total / count
