"""`genctl inspect-cache --plan`: the memory of a cache, and the largest batch and length that fit, from a config alone.

A part of the cache takes rows x columns x the bytes of one column of one row, which `skeleton` measures. The number of
rows and columns depends on its kind (`Part.stored`). A plan equals the measurement of `inspect-cache` for the same
rows and columns, to the byte.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from genctl.commands.inspect.measurement import CROSS, STATE, divided
from genctl.config.modes import check_search
from genctl.errors import UsageError
from genctl.io.records import SCHEMA
from genctl.models.config_limits import context_of, source_context_of, trained_length
from genctl.params import Generation, Runtime

if TYPE_CHECKING:
    from genctl.commands.inspect.skeleton import Skeleton


class Size(NamedTuple):
    """The size of a run: `rows` in total, `length` columns each, `source` columns of an encoder.

    With `grouped` the rows of a prompt share one row of cross-attention, even in a batch of several prompts.
    """

    batch: int
    rows: int
    length: int
    source: int = 0
    grouped: bool = False


class Part(NamedTuple):
    """A layer's keys and values, its cross-attention, or its recurrent state."""

    entry: Mapping[str, Any]  # of `Cache.describe`, for a few columns of one row
    cell: int  # bytes of one column of one row; bytes of one row if there are no columns

    def stored(self, size: Size, more: int = 0) -> tuple[int, int]:
        """Stored rows and columns; a window layer stores up to `more` extra columns, a state has one column.

        Cross-attention has one row for each prompt, whatever its number of beams; with transformers' classes and
        several prompts it has all rows.
        """
        kind, window = self.entry["kind"], self.entry.get("window")
        if kind == STATE:
            return size.rows, 1
        if kind == CROSS:
            return size.batch if size.grouped or size.batch == 1 else size.rows, size.source
        if window is None or window == 1:  # 1 keeps all columns (see `decode.runtime.cut_bound`)
            return size.rows, size.length
        return size.rows, min(size.length, window - 1 + more)

    def bytes(self, size: Size) -> int:
        """All bytes of the part, with the scales of quantised numbers."""
        return math.prod(self.stored(size)) * self.cell

    def reserved(self, size: Size) -> int:
        """The most bytes that its buffers take, with room for later tokens."""
        from genctl.decode.batch_cache import ROOM
        from genctl.decode.cache.growing import STEP, grown

        if self.entry["kind"] != "static" and size.length > ROOM + 1:  # beyond ROOM new tokens buffers are reallocated
            size = size._replace(length=grown(size.length))
        return math.prod(self.stored(size, STEP)) * self.cell

    def sized(self, size: Size, device: str) -> dict[str, Any]:
        """The part as an entry of `Cache.describe` in a run of this size."""
        rows, columns = self.stored(size)

        def shape(one: Sequence[int]) -> list[int]:
            return [rows, *one[1:]] if self.entry["kind"] == STATE else [rows, one[1], columns, *one[3:]]

        entry = {**self.entry, "device": device, "bytes": self.bytes(size)}
        entry |= {name: shape(entry[name]) for name in ("shape", "value_shape") if name in entry}
        if "filled" in entry:
            entry["filled"] = size.length
        if "states" in entry:
            entry["states"] = {name: shape(one) for name, one in entry["states"].items()}
        return entry


def total(parts: Sequence[Part], size: Size) -> int:
    """Bytes of all parts. Monotonic in rows and columns."""
    return sum(part.bytes(size) for part in parts)


def plan(
    runtime: Runtime,
    generation: Generation,
    *,
    batch: int,
    length: int | None = None,
    source_length: int | None = None,
    memory: int | None = None,
    **trust: bool,
) -> dict[str, Any]:
    """The report of a plan, with the keys of a measurement, and `plan`: the request, and what fits.

    `batch` prompts, each with the rows of the strategy; `length` columns of each row, with the prompt (default:
    the model's context); `source_length` tokens of an encoder (default: its context, or `length`); `memory` in bytes.
    `reserved_bytes` is the most that the buffers take, with room for later tokens: exact at the end of a run with
    at most 512 new tokens, else an upper bound. Raises UsageError for conflicting options, ModelError for a model that
    cannot be planned.
    """
    per_prompt = rows_of(generation)
    from genctl.commands.inspect import skeleton as skeletons

    form = generation.cache_implementation if generation.use_cache else "off"
    skeleton = skeletons.read(runtime, form, **trust)
    weights, parts = skeleton.weights, []
    for entry in skeleton.cache:
        parts.append(Part(entry, entry["bytes"] // (1 if entry["kind"] == STATE else max(entry["shape"][2], 1))))
    context, length, source = _lengths(skeleton, length, source_length)
    size = Size(batch, batch * per_prompt, length, source or 0, grouped=skeleton.is_native)
    in_all = total(parts, size)

    longest = largest_batch = fits = None
    if memory is not None:
        room = memory - weights
        longest = largest(lambda length: total(parts, size._replace(length=length)), room, context)
        largest_batch = largest(lambda batch: total(parts, size._replace(batch=batch, rows=batch * per_prompt)), room)
        fits = in_all <= room
    return {
        "schema": SCHEMA,
        "model": skeleton.name,
        "cache": form,
        "layers": [part.sized(size, skeleton.device) for part in parts],
        "total_bytes": in_all,
        "reserved_bytes": sum(part.reserved(size) for part in parts),
        "weights_bytes": weights,
        "bytes_per_token": divided(in_all - total(parts, size._replace(length=length - 1)), size.rows),
        "bytes_per_row": divided(in_all, size.rows),
        "share_of_weights": in_all / weights if weights else None,
        "steps": [],
        "plan": {
            "batch": batch,
            "num_beams": generation.num_beams,
            "rows": size.rows,
            "length": length,
            "source_length": source,
            "dtype": skeleton.dtype,
            "context": context,
            "memory_bytes": memory,
            "longest_length": longest,
            "length_bound": None if longest is None else "context" if longest == context else "memory",
            "largest_batch": largest_batch,
            "fits": fits,
            "notes": [*skeleton.notes, *_notes(skeleton, generation)],
        },
    }


def rows_of(generation: Generation) -> int:
    """Rows that the strategy keeps for each prompt. Raises UsageError for conflicting knobs."""
    check_search(generation)
    if generation.num_beams > 1:
        return generation.num_beams
    # contrastive search reads each candidate in its own row
    others = generation.top_k if generation.penalty_alpha else generation.num_return_sequences
    return generation.best_of or generation.mbr_samples or others


def largest(bytes_of: Callable[[int], int], room: int, most: int | None = None) -> int | None:
    """The largest number up to `most` whose bytes fit into `room`; 0 if 1 does not fit. `bytes_of` is monotonic.

    Without `most` numbers up to 2^62 are tried, and the result is None if all fit.
    """
    numbers = range(1, (most or 1 << 62) + 1)
    found = bisect_right(numbers, room, key=bytes_of)
    return most if found == len(numbers) else found


def _lengths(skeleton: Skeleton, length: int | None, source: int | None) -> tuple[int | None, int, int | None]:
    """The context, the planned length, and the source's length. Raises UsageError for lengths out of range."""
    name, config = skeleton.name, skeleton.config
    context = context_of(config)
    length = length or context or trained_length(config)
    if length is None:
        raise UsageError(f"--plan for {name} needs --length: nothing bounds how long its texts may be")
    if context is not None and length > context:
        raise UsageError(f"--length {length}: the context of {name} is {context} tokens")
    if not getattr(config, "is_encoder_decoder", False):
        if source is not None:
            raise UsageError(f"--source-length {source} is for encoder-decoders, and {name} has no encoder")
        return context, length, None
    most = source_context_of(config)
    if most is not None and source is not None and source > most:
        raise UsageError(f"--source-length {source}: the encoder of {name} reads {most} tokens at most")
    return context, length, source or most or length


def _notes(skeleton: Skeleton, generation: Generation) -> list[str]:
    """Notes on settings that a run uses and this plan does not, and on memory that the plan does not count."""
    notes, settings = [], skeleton.settings
    for name in ("num_beams", "num_return_sequences"):
        stored = settings.values.get(name)
        if type(stored) is int and stored > 1 and getattr(generation, name) == 1:
            notes.append(f"{settings.file} says {name} = {stored}, which a run follows; this plan has {name} = 1")
    names = ("assistant_model", "amateur_model", "prompt_lookup_num_tokens", "assistant_early_exit")
    others = [name for name in names if getattr(generation, name)]
    others += ["guidance_scale"] if generation.guidance_scale not in (None, 1.0) else []
    if others:
        notes.append(f"what {' and '.join(others)} needs beside this (weights, caches, drafts) is not counted")
    return notes
