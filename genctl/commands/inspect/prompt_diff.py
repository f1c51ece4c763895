"""Compare two prompts and measure what reusing the first one's cache saves: the second is decoded both ways."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.text import Text

from genctl import events
from genctl.commands.inspect.cache_report import PIPE
from genctl.commands.inspect.measurement import CROSS, STATE
from genctl.decode.prefix_cache import KeptTexts
from genctl.decode.runtime import Passed
from genctl.decode.types import Prefix
from genctl.engines.protocol import Flow, Report, Request
from genctl.engines.session import Session
from genctl.errors import GenctlError, InputError, ModelError, count, percent, size
from genctl.events import shared_length
from genctl.terminal import theme, widgets
from genctl.terminal.text_width import first_cells, hanging, last_cells

# Two prompts compared: their common prefix, and what reusing its cache saves.


LABEL = 16  # cells


def diff_lines(diff: Mapping[str, Any], width: int | None) -> list[Text]:
    """The comparison in lines of at most `width` cells."""
    page = width or PIPE
    room = page - LABEL
    common, tokens = diff["common_tokens"], diff["prompt_tokens"]
    lines = [widgets.header(page, "reused by", diff["prompt"])]
    shown = last_cells(diff["common_text"], room - 2) if common else ""
    lines += _line("in common", count(common, "token") + (f": “{shown}”" if common else ""), page)
    for name, text in zip(("the first", "the other"), diff["part"], strict=True):
        lines += _line(name, f"goes on “{first_cells(text, room - 10)}”" if text else "ends here", page)
    reused, bytes_ = diff["reused_tokens"], diff["spared_bytes"]
    words = f"{reused} of {count(tokens, 'token')} ({percent(diff['share_reused'], 0)})"
    if reused:
        words += f", {bytes_:,} bytes of cache" + (f" ({size(bytes_)})" if bytes_ >= 1024 else "")
    lines += _line("reused", words, page)
    if diff["reason"]:
        lines += _line("", diff["reason"], page)
    for name, key in (("with reuse", "with_reuse"), ("without", "without_reuse")):
        counts = diff[key]
        read, passes = count(counts["prompt_tokens_read"], "token"), counts["passes"]
        lines += _line(name, f"{read} of the prompt read, {count(passes, 'pass', 'passes')} in all", page)
    same = "the same tokens were written" if diff["tokens_agree"] else "DIFFERENT tokens were written"
    lines += _line("", same, page, error=not diff["tokens_agree"])
    return lines


def _line(label: str, words: str, width: int, *, error: bool = False) -> list[Text]:
    return hanging(f"{label:<{LABEL}}", widgets.visible(words), width, theme.ERROR if error else theme.PLAIN)


SHOWN = 6  # tokens shown after the common prefix


@dataclass
class DecodingCount:
    """One decoding of the second prompt, counted while it runs."""

    prompt_tokens_read: int = 0  # of the prompt: tokens fed to the model before the first new token
    passes: int = 0  # through the decoder, those of the prompt included
    token_ids: list[list[int]] = field(default_factory=list)


def difference(
    session: Session, first: Request, second: Request, *, interrupted: Callable[[], str] = lambda: ""
) -> dict[str, Any]:
    """Compare both prompts token by token, and decode the second with and without the first one's cache.

    Raises the errors of planning a request, and ModelError if the model keeps no cache.
    """
    from genctl.models.text import detokenizer

    if not session.forward.abilities.supports_cache:
        raise ModelError(f"{session.loaded.name} keeps no cache, so there is nothing that --diff could reuse")
    first_plan, second_plan = (session.planner.plan(request, Report()) for request in (first, second))
    ids = (
        tuple(first_plan.lane.source or first_plan.lane.tokens),
        tuple(second_plan.lane.source or second_plan.lane.tokens),
    )
    common = shared_length(*ids)
    behind = detokenizer(session.loaded.tokenizer).after(ids[0][:common])
    prefix = _resumable(session, first)
    reading, reused = _decode(session, second, prefix, interrupted)
    alone, _ = _decode(session, second, None, interrupted)
    return {
        "prompt": second_plan.prompt.text,
        "prompt_tokens": len(ids[1]),
        "common_tokens": common,
        "common_text": session.planner.text(ids[0][:common]),
        "part": [behind.decode(tokens[common : common + SHOWN]) for tokens in ids],
        "reused_tokens": reused,
        "share_reused": reused / len(ids[1]),
        "spared_bytes": spared(prefix, reused),
        "with_reuse": asdict(reading),
        "without_reuse": asdict(alone),
        "tokens_agree": reading.token_ids == alone.token_ids,
        "reason": _reason(session, prefix, common, reused, ids),
    }


def spared(prefix: Prefix, reused: int) -> int:
    """Bytes of a prefix (prefilled with `whole`) that need not be computed if `reused` of its tokens are reused."""
    total = 0
    if not reused:
        return 0
    for layer in prefix.cache.describe() if prefix.cache is not None else ():
        if prefix.source is not None:  # only the source's part is reused: the decoder starts again
            total += layer["bytes"] if layer["kind"] == CROSS else 0
        elif layer["kind"] == STATE:
            total += layer["bytes"]
        else:
            total += layer["bytes"] // layer["shape"][2] * min(reused, layer["shape"][2])
    return total


def _resumable(session: Session, request: Request) -> Prefix:
    lane = session.planner.plan(request, Report()).lane
    source = None if lane.source is None else session.forward.encode(lane.source)
    return session.forward.prefill(lane.tokens, source, hidden=lane.strategy.traits.needs_hidden, whole=True)


def _decode(
    session: Session, request: Request, saved: Prefix | None, interrupted: Callable[[], str]
) -> tuple[DecodingCount, int]:
    """Decode the request with a saved prompt; and how many tokens of its prompt were not read again."""
    reading = DecodingCount()
    forward = session.forward
    before, texts = forward.forwards, session.texts
    fed = 0

    def count(passed: Passed) -> None:
        nonlocal fed
        tokens = passed.inputs.get("decoder_input_ids", passed.inputs.get("input_ids"))
        fed += 0 if tokens is None else int(tokens.numel())

    forward.watch, session.texts = count, None if saved is None else KeptTexts(saved=saved)
    reused = 0
    try:
        for event in session.stream([request], None, Flow(interrupted=interrupted)):
            if isinstance(event, events.Prefilled):
                reused = event.reused
                # not counted: an encoder's pass, which reads the whole source or does not happen
                reading.prompt_tokens_read = event.prompt_tokens - reused if forward.is_encoder_decoder else fed
            elif isinstance(event, events.Finished):
                reading.token_ids = [list(hypothesis.tokens) for hypothesis in event.hypotheses]
            elif isinstance(event, events.Failed):
                raise _again(event)
    finally:
        forward.watch, session.texts = None, texts
    reading.passes = forward.forwards - before
    return reading, reused


def _again(event: events.Failed) -> GenctlError:
    return (ModelError if event.code == ModelError.code else InputError)(event.message)


def _reason(
    session: Session, prefix: Prefix, common: int, reused: int, ids: tuple[tuple[int, ...], tuple[int, ...]]
) -> str:
    """Why less is reused than the common prefix; "" if all of it is."""
    if session.forward.is_encoder_decoder:
        return "" if reused else "an encoder reads a source as a whole, so only an equal source can be reused"
    if reused == common:
        return ""
    croppable = prefix.cache is not None and prefix.cache.is_croppable
    if not croppable and common < len(ids[0]):
        return "a recurrent state cannot be cut back to where the prompts part: it is reused only as a whole"
    if not croppable:
        return "a recurrent state cannot be cut back: the last token, which is always read, is in it already"
    return "the last token is always read: it says what follows"
