"""Results of a tree's commands as records, and as lines for people: of scripts, and of dialogs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from rich.text import Text

from genctl import errors, events
from genctl.io.records import finite
from genctl.io.writers import tsv_cell
from genctl.terminal import theme
from genctl.terminal.widgets import token_text, visible
from genctl.tree.results import (
    Alternative,
    At,
    AtLayer,
    Beside,
    Bookmarked,
    BranchText,
    Compared,
    Continuation,
    Covered,
    Repeat,
    Result,
    Settings,
    Shown,
    Why,
    Wrote,
)

COLUMNS = ("sequence", "logprob", "total", "mass", "ended", "token_ids", "text")


def continuation_record(sequence: int, found: Continuation) -> dict[str, Any]:
    """A row of --expand. `beside` and `parts` tell of a second distribution, if there is one."""
    second = {} if found.beside is None else {"beside": finite(found.beside), "parts": found.parts}
    return {
        "schema": "genctl/1",
        "sequence": sequence,
        "token_ids": list(found.token_ids),
        "text": found.text,
        "logprob": found.logprob,
        "total": finite(found.total),
        "mass": found.mass,
        "ended": found.ended,
        **({"dead": True} if found.dead else {}),
        **second,
    }


def result_record(result: Result) -> dict[str, Any]:
    """A result of a command, as `genctl.events` writes events; numbers that are not finite are null."""
    record: dict[str, Any] = finite(events.to_json(result))
    return record


def continuation_line(found: Continuation, *, tabs: bool) -> str:
    """A row of --expand for people: its probability, the mass so far, and the text; `tabs` for a pipe."""
    share = math.exp(found.total)
    beside = ""
    if found.beside is not None:  # the token at which the two part is marked
        where = "" if found.parts is None else f" ≠{found.parts + 1}"
        beside = f"{percent(math.exp(found.beside))}{where}"
    if tabs and beside:
        return f"{share:.6g}\t{found.mass:.6g}\t{math.exp(found.beside or 0.0):.6g}\t{tsv_cell(found.text)}"
    if tabs:
        return f"{share:.6g}\t{found.mass:.6g}\t{tsv_cell(found.text)}"
    beside = f"{beside:<14}  " if beside else ""
    end = " ■" if found.ended else " ✗ no token can follow" if found.dead else ""
    return f"{percent(share):>8}  {percent(found.mass):>8}  {beside}{_quoted(found.text)}{end}"


def covered_line(done: Covered) -> str:
    """What an expansion came to."""
    rows = "1 continuation covers" if done.continuations == 1 else f"{done.continuations} continuations cover"
    words = f"{rows} {percent(done.mass)} of the probability; {done.nodes} texts were continued"
    if done.dead_ends:
        words += f", and after {done.dead_ends} of them no token can follow"
    return words if done.complete else f"{words}: it ends here, since {done.reason}"


def percent(share: float) -> str:
    """A joint probability: `31.2%`, `3.1e-04%`. One below 1 is not 100%."""
    if 0.99995 <= share < 1.0 - 1e-9:
        return "99.99%"
    return errors.percent(min(share, 1.0), significant=4)


def lines_of(result: Result) -> Iterator[str]:
    """A result for people without colour, as scripts write it."""
    return (line.plain for line in drawn(result, coloured=False))


def drawn(result: Result, *, coloured: bool = True, width: int | None = None) -> Iterator[Text]:
    """A result for people, in scripts and in dialogs; `width`: cells in which the line of a layer has to fit.

    Tokens that are written one by one give none: what was written comes at the end.
    """
    if isinstance(result, Shown):
        yield from _shown(result, coloured)
    elif isinstance(result, AtLayer):
        yield _layer(result, coloured, width)
    else:
        yield from map(Text, _plain(result))


def _plain(result: Result) -> Iterator[str]:
    if isinstance(result, Wrote):
        how = f"{result.reason}, {result.logprob:.3f} nats" + (
            f", seed {result.seed}" if result.seed is not None else ""
        )
        yield f"node {result.node}  {_quoted(result.text)}  ({how})"
    elif isinstance(result, At) and result.note:
        yield result.note
    elif isinstance(result, Continuation):
        yield continuation_line(result, tabs=False)
    elif isinstance(result, Covered):
        yield covered_line(result)
    elif isinstance(result, Why):
        yield from _why(result)
    elif isinstance(result, Compared):
        yield f"shared  {_quoted(result.shared_text)}"
        for node, text, logprob, length in zip(
            result.nodes, result.texts, result.logprobs, result.lengths, strict=True
        ):
            yield f"node {node}  {_quoted(text)}  ({length} tokens, {logprob:.3f} nats)"
    elif isinstance(result, Beside):
        yield _beside(result)
    elif isinstance(result, Bookmarked):
        yield f"{result.name} is node {result.node}"
    elif isinstance(result, Settings):
        values = ", ".join(f"{key} = {value!r}" for key, value in result.values.items())
        yield "; ".join([values or "the settings that the tree began with", *result.notes])
    elif isinstance(result, BranchText):
        yield visible(result.prompt + result.text)
    elif isinstance(result, Repeat):
        yield from result.commands
        if result.note:
            yield f"# {result.note}"


def _share(share: float, coloured: bool, width: int = 0) -> Text:
    return Text(f"{percent(share):>{width}}", style=theme.colour(share) if coloured else theme.PLAIN)


def _shown(shown: Shown, coloured: bool) -> Iterator[Text]:
    yield Text(
        f"after node {shown.node}: entropy {shown.entropy:.3f} nats; these {len(shown.alternatives)} tokens have "
        f"{percent(shown.mass)}"
    )
    for effect in shown.effects:
        yield Text(f"  {effect.processor}: removed {effect.removed}, moved {percent(effect.moved)}")
    for each in shown.alternatives:
        share = _share(each.probability, coloured, 9)
        yield Text.assemble(f"{each.rank:>6}  ", share, f"  {_after(each):<24}  {token_text(each.id, each.text)}")


def _layer(layer: AtLayer, coloured: bool, width: int | None) -> Text:
    """What a layer would say: as many of its tokens as there is room for."""
    line = Text(f"layer {layer.layer:>2}  entropy {layer.entropy:.2f}", no_wrap=True)
    own = Text()
    if layer.rank is not None and layer.logprob is not None:
        share = _share(math.exp(layer.logprob), coloured)
        own = Text.assemble(f"  (written: rank {layer.rank}, ", share, ")")
    for id, text, value in layer.alternatives:
        each = Text.assemble(f"  {token_text(id, text)} ", _share(math.exp(value), coloured))
        if width is not None and line.cell_len + each.cell_len + own.cell_len > width:
            break
        line.append_text(each)
    return line.append_text(own)


def _beside(both: Beside) -> str:
    """Two distributions at one token: ≠ where the two would write different ones."""
    one, two = both.best
    written = "" if both.written is None else token_text(both.written[0].id, both.written[0].text)
    chances = "" if both.written is None else " | ".join(percent(each.chance) for each in both.written)
    differ = f"≠ {token_text(one.id, one.text)} | {token_text(two.id, two.text)}" if both.parts else ""
    return f"{written:<16} {chances:<22} {percent(both.moved):>8} apart  {differ}".rstrip()


def _after(each: Alternative) -> str:
    """What the processors made of a token."""
    if each.removed_by:
        return f"removed by {each.removed_by}"
    return "" if each.processed == each.logprob else f"→ {percent(each.chance)}"


def _why(why: Why) -> Iterator[str]:
    token = why.token
    yield f"{token_text(token.id, token.text)}  rank {token.rank}, {percent(token.probability)} by the model"
    for effect in why.trace:
        change = f"{percent(effect.before)} → {percent(effect.after)}"
        yield f"  {effect.processor}: {change} (removed {effect.removed} tokens, moved {percent(effect.moved)})"
    if not why.trace:
        yield "  no processor acts"


def _quoted(text: str) -> str:
    return '"' + visible(text).replace("\n", "\\n").replace("\t", "\\t") + '"'
