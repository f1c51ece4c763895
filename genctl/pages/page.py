"""Collect the data of a page from the events of a run, and make the page: one self-contained file.

A page loads nothing and sends nothing: its content security policy allows one style sheet and one script, by their
digests. Text of a model, a prompt or a preset enters it in only two ways: through the template, which escapes it, and
as JSON in which no character can end a script element.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from genctl.events import Began, CacheRead, Event, Finished, Loading
from genctl.pages.search_tree import SCALE, TreeBuilder, TreeDetail, Vocabulary, columns, known
from genctl.terminal.widgets import visible

HELD = 300_000  # nodes of search trees that are kept; prompts that finish later keep only their texts
LISTED = 20_000  # prompts on a page; further ones are only counted
LONG = 400  # characters of a prompt or text in a shortened page


@dataclass
class PageData:
    """Listens to a run. The page is a function of the events, and of fields that a command adds:

    `facts` (label and value of the summary), `job` (the settings as TOML), `cache` (the report of `inspect-cache`),
    `comparison` (runs side by side) and `figures` (more numbers of a lane, by its name).
    """

    facts: list[tuple[str, str]] = field(default_factory=list)
    command: str = ""
    job: str = ""
    cache: Mapping[str, Any] | None = None
    comparison: Mapping[str, Any] | None = None
    figures: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    lanes: dict[str, TreeBuilder] = field(default_factory=dict)
    unlisted: int = 0
    _nodes: int = 0

    def feed(self, event: Event) -> None:
        """Process one event. Raises InputError for one that cannot follow the earlier ones."""
        if isinstance(event, (Loading, CacheRead)):
            return
        if event.lane not in self.lanes:
            if len(self.lanes) >= LISTED:
                self.unlisted += isinstance(event, Began)
                return
            self.lanes[event.lane] = TreeBuilder(event.lane)
        lane = self.lanes[event.lane]
        lane.feed(event)
        if isinstance(event, Finished):  # keep the tokens of finished lanes while there is room
            self._nodes += lane.size
            if self._nodes > HELD and len(self.lanes) > 1:
                lane.drop_rows()

    @property
    def begun(self) -> list[Began]:
        """The `Began` event of each lane."""
        return [lane.history.began for lane in self.lanes.values() if lane.history.began is not None]

    @property
    def done(self) -> list[Finished]:
        """The `Finished` event of each finished lane."""
        return [lane.history.finished for lane in self.lanes.values() if lane.history.finished is not None]

    @property
    def tokens(self) -> int:
        """The tokens of all sequences."""
        return sum(hypothesis.length for finished in self.done for hypothesis in finished.hypotheses)

    @property
    def is_scored(self) -> bool:
        """Whether the texts were given and scored, not generated."""
        return any(hypothesis.reason == "scored" for finished in self.done for hypothesis in finished.hypotheses)

    @property
    def title(self) -> str:
        """The subject of the page, in a few words."""
        begun = self.begun
        if not begun:
            return "genctl"
        strategies = list(dict.fromkeys(began.strategy for began in begun))
        return " · ".join([begun[0].model or "genctl", *strategies[:4]])

    def document(
        self, detail: TreeDetail = "all", *, with_tokens: int | None = None, short: bool = False
    ) -> dict[str, Any]:
        """The page as plain JSON values.

        Only the first `with_tokens` lanes include their tokens (None: all); with `short` prompts and texts are cut.
        """
        vocabulary: Vocabulary = {}
        lanes = []
        for place, lane in enumerate(self.lanes.values()):
            whole = lane.has_tokens and (with_tokens is None or place < with_tokens)
            lanes.append(self._entry(lane, vocabulary if whole else None, detail, LONG if short else None))
        document: dict[str, Any] = {"lanes": lanes, "vocabulary": [[id, text] for id, text in vocabulary]}
        if self.unlisted:
            document["unlisted"] = self.unlisted
        if self.comparison is not None:
            document["comparison"] = dict(self.comparison)
        if self.cache is not None:
            document["cache"] = dict(self.cache)
        return document

    def _entry(
        self, lane: TreeBuilder, vocabulary: Vocabulary | None, detail: TreeDetail, long: int | None
    ) -> dict[str, Any]:
        history = lane.history
        began, finished, prefilled = history.began, history.finished, history.prefilled
        entry: dict[str, Any] = {"lane": history.lane}
        if began is not None:
            entry |= {"prompt": cut(history.prompt, long), "strategy": began.strategy, "model": began.model}
            entry |= {"seed": began.seed, "place": began.place}
            if began.input and long is None:
                entry["input"] = began.input
            if self.comparison is not None:
                entry["run"], entry["id"] = self.comparison["lanes"][began.lane]
            entry["length_penalty"] = began.settings.get("length_penalty", 1.0)
            entry["answers"] = began.encoder_decoder
        if prefilled is not None:
            entry["prompt_tokens"] = prefilled.prompt_tokens
        if finished is not None:
            entry |= {"seconds": round(finished.seconds, 4), "first_token_s": round(finished.first_token_s, 4)}
            entry["sequences"] = [
                {
                    "text": cut(hypothesis.text, long),
                    "tokens": hypothesis.length,
                    "logprob": known(hypothesis.logprob),
                    "score": known(hypothesis.score),
                    "reason": hypothesis.reason,
                    "cause": hypothesis.cause,
                }
                for hypothesis in finished.hypotheses
            ]
        elif history.failed is None:
            entry["sequences"] = [
                {"text": cut(path.text(), long), "tokens": path.length, "reason": "unfinished"}
                for path in history.rows
                if path.length
            ]
        if history.failed is not None:
            entry["error"] = {"code": history.failed.code, "message": history.failed.message}
        if history.lane in self.figures:
            entry["figures"] = dict(self.figures[history.lane])
        if vocabulary is not None and lane.size > 1:
            entry["tree"] = columns(lane.tree(), vocabulary, detail)
        return entry


def cut(text: str, most: int | None) -> str:
    """The text, or its beginning and the number of omitted characters."""
    if most is None or len(text) <= most:
        return text
    return f"{text[:most]} … ({len(text) - most:,} more characters)"


def facts_of(page: PageData) -> list[tuple[str, str]]:
    """The summary that follows from the events alone."""
    begun = page.begun
    facts = []
    for label, values in (
        ("checkpoint", [began.model for began in begun]),
        ("strategy", [began.strategy for began in begun]),
        ("runtime", [str(began.settings.get("runtime", "")) for began in begun]),
    ):
        each = [value for value in dict.fromkeys(values) if value]
        if each:
            facts.append((label, ", ".join(each)))
    seeds = list(dict.fromkeys(began.seed for began in begun if began.seed is not None))
    if len(seeds) == 1:
        facts.append(("seed", str(seeds[0])))
    if page.comparison is not None:
        facts.append(("runs", ", ".join(page.comparison["runs"])))
    prompts = len(page.lanes) if page.comparison is None else len(page.comparison["prompts"])
    facts.append(("texts" if page.is_scored else "prompts", f"{prompts + page.unlisted:,}"))
    facts.append(("scored tokens" if page.is_scored else "new tokens", f"{page.tokens:,}"))
    failed = sum(lane.history.failed is not None for lane in page.lanes.values())
    if failed:
        facts.append(("failed", f"{failed:,}"))
    return facts


LARGEST = 2_000_000  # bytes of a page, unless its texts alone are longer
WITHOUT_SCRIPT = 500  # prompts that are shown if scripts are disabled


def page(data: PageData) -> bytes:
    """The page in UTF-8. Details are left out, alternatives first, until it has at most LARGEST bytes."""
    style, script = (file_text(name) for name in ("page.css", "page.js"))
    text = ""
    for document, left_out in _documents(data):
        text = _filled(data, document, style, script, left_out)
        if len(text.encode("utf-8", "backslashreplace")) <= LARGEST:
            break
    return text.encode("utf-8", "backslashreplace")


def _documents(data: PageData) -> Iterator[tuple[dict[str, Any], str]]:
    """The data with less and less detail, each with a note on what is left out; the last one has no tokens."""
    yield data.document(), ""
    left_out = "alternatives, ranks, entropies and dead branches are left out"
    yield data.document("none"), left_out
    kept = len(data.lanes)
    while kept:
        kept //= 2
        texts = f"texts are cut after {LONG} characters, and tokens are those of {kept:,} prompts"
        yield data.document("none", with_tokens=kept, short=True), f"{texts}; {left_out}"


def script_json(value: Any) -> str:
    """JSON that is safe in a script element: no `<`, `>` or `&`, and no line separator of JavaScript."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def digest(text: str) -> str:
    """The source expression of a policy for an element with this text."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _filled(data: PageData, document: Mapping[str, Any], style: str, script: str, left_out: str) -> str:
    unlisted = f"{data.unlisted:,} more prompts are not listed" if data.unlisted else ""
    return filled(
        "page.html.jinja",
        title=data.title,
        command=visible(data.command),
        facts=[(label, visible(value)) for label, value in data.facts],
        job=data.job,
        left_out="; ".join(filter(None, (left_out, unlisted))),
        document=document,
        lanes=document["lanes"][:WITHOUT_SCRIPT],
        more=max(len(document["lanes"]) - WITHOUT_SCRIPT, 0),
        style=style,
        style_digest=digest(style),
        script=script,
        script_digest=digest(script),
        data=script_json({**document, "scale": SCALE}),
    )


def filled(template: str, **values: Any) -> str:
    """A template of this package filled with values, which are escaped."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(file_text),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template(template).render(**values)


def file_text(name: str) -> str:
    """A file of this package."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
