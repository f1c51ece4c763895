"""Format the results of tree commands: as records, and as lines of text for scripts and dialogs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from genctl import errors, events
from genctl.errors import GenctlError
from genctl.io.records import finite
from genctl.io.writers import tsv_cell
from genctl.terminal.widgets import token_text, visible
from genctl.tree.commands import BranchText, Continuation, Covered, Result, Saved, Settings, Shown, Why, Wrote
from genctl.tree.token_tree import At

COLUMNS = ("sequence", "logprob", "total", "mass", "ended", "token_ids", "text")


def record(result: Result, sequence: int | None) -> dict[str, Any]:
    """A result as a record; with a `sequence` number, a row of --expand. Numbers that are not finite become null."""
    found = events.to_json(result)
    if sequence is not None:
        fields = ("token_ids", "text", "logprob", "total", "mass", "ended", *(["dead"] if "dead" in found else []))
        found = {"schema": "genctl/1", "sequence": sequence, **{name: getattr(result, name) for name in fields}}
    shown: dict[str, Any] = finite(found)
    return shown


def covered_line(done: Covered) -> str:
    """The summary line of an expansion."""
    rows = "1 continuation covers" if done.continuations == 1 else f"{done.continuations} continuations cover"
    words = f"{rows} {percent(done.mass)} of the probability; {done.nodes} texts were continued"
    if done.dead_ends:
        words += f", and after {done.dead_ends} of them no token can follow"
    return words if done.complete else f"{words}: it ends here, since {done.reason}"


def percent(share: float) -> str:
    """A joint probability: `31.2%`, `3.1e-04%`."""
    return errors.percent(min(share, 1.0), significant=4)


def lines_of(result: Result, *, tabs: bool = False) -> Iterator[str]:
    """The lines of a result, in scripts and dialogs. With `tabs`, a row of --expand is separated by tabs.

    Tokens that are written one by one (`TokenWritten`) have no line: `Wrote` has their text.
    """
    if isinstance(result, Shown):
        yield from _shown(result)
    elif isinstance(result, Wrote):
        seed = f", seed {result.seed}" if result.seed is not None else ""
        yield f"node {result.node}  {_quoted(result.text)}  ({result.reason}, {result.logprob:.3f} nats{seed})"
    elif isinstance(result, At) and result.note:
        yield result.note
    elif isinstance(result, Continuation):
        share = math.exp(result.total)
        end = " ■" if result.ended else " ✗ no token can follow" if result.dead else ""
        if tabs:
            yield f"{share:.6g}\t{result.mass:.6g}\t{tsv_cell(result.text)}"
        else:
            yield f"{percent(share):>8}  {percent(result.mass):>8}  {_quoted(result.text)}{end}"
    elif isinstance(result, Covered):
        yield covered_line(result)
    elif isinstance(result, Why):
        yield from _why(result)
    elif isinstance(result, Settings):
        values = ", ".join(f"{key} = {value!r}" for key, value in result.values.items())
        yield values or "the settings that the tree began with"
    elif isinstance(result, BranchText):
        yield visible(result.prompt + result.text)
    elif isinstance(result, Saved):
        yield f"the tree is saved in {visible(result.path)}"


def _shown(shown: Shown) -> Iterator[str]:
    end = " (after EOS)" if shown.after_eos else ""
    found = f"these {len(shown.alternatives)} tokens have {percent(shown.mass)}"
    yield f"after node {shown.node}{end}: entropy {shown.entropy:.3f} nats; {found}"
    for effect in shown.effects:
        yield f"  {effect.processor}: removed {effect.removed}, moved {percent(effect.moved)}"
    for each in shown.alternatives:
        after = f"removed by {each.removed_by}" if each.removed_by else ""
        if not after and each.processed != each.logprob:
            after = f"→ {percent(each.chance)}"
        yield f"{each.rank:>6}  {percent(each.probability):>9}  {after:<24}  {token_text(each.id, each.text)}"


def _why(why: Why) -> Iterator[str]:
    token = why.token
    end = ", after EOS" if why.after_eos else ""
    yield f"{token_text(token.id, token.text)}  rank {token.rank}, {percent(token.probability)} by the model{end}"
    for effect in why.trace:
        change = f"{percent(effect.before)} → {percent(effect.after)}"
        yield f"  {effect.processor}: {change} (removed {effect.removed} tokens, moved {percent(effect.moved)})"
    if not why.trace:
        yield "  no processor acts"


def _quoted(text: str) -> str:
    return '"' + visible(text).replace("\n", "\\n").replace("\t", "\\t") + '"'


def in_words(failed: Exception) -> str:
    """An error message for the status line."""
    if isinstance(failed, GenctlError):
        return f"{failed.message}{f' ({failed.hint})' if failed.hint else ''}"
    return f"unexpected {type(failed).__name__}: {failed} (this is a bug)"
