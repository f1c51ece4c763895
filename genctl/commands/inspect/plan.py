"""`genctl inspect-cache --plan`: the memory that a cache takes, and what fits beside the weights, from a config alone.

A part of the cache takes rows x columns x the bytes of one column of one row, which `skeleton` measures. How many rows
and columns there are depends on its kind:

    full, static, quantised   all rows, all columns
    sliding window            all rows, the newest window - 1 columns
    cross-attention           the source's columns; one row for a prompt, however many beams it has (with transformers'
                              classes, where there are several prompts, all rows)
    recurrent state           all rows, no columns

so a plan equals what `inspect-cache` measures for as many rows and columns, to the byte.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from genctl.commands.inspect.measurement import CROSS, STATE, divided
from genctl.commands.inspect.options import InspectOptions
from genctl.commands.inspect.report import plan_lines
from genctl.commands.options import memory_bytes
from genctl.config.layers import Resolved
from genctl.config.modes import check_search
from genctl.errors import Exit, UsageError
from genctl.io.records import SCHEMA
from genctl.io.writers import report_text
from genctl.models.sizes import context_of, source_context_of, trained_length
from genctl.params import Generation, Runtime
from genctl.terminal.console import make_consoles
from genctl.terminal.widgets import visible

if TYPE_CHECKING:
    from genctl.commands.inspect.skeleton import Skeleton

COLUMNS = ("layer", "kind", "shape", "dtype", "device", "bytes")  # of --format tsv
SHARED = 64  # least columns of a prompt that its rows share (`decode.cache.shared`), in the native runtime


def perform(options: InspectOptions, early: Resolved) -> int:
    """Print the plan. Returns the exit status: 4 if --memory is given and too small for it, else 0.

    Raises UsageError and ModelError before anything is printed.
    """
    if early.runtime.prompt_cache is not None and early.settings["prompt_cache"].kind == "command":
        raise UsageError("--prompt-cache belongs to a measurement, and --plan decodes nothing")
    report = plan(
        early.runtime,
        early.generation,
        batch=options.batch or 1,
        length=options.length,
        source_length=options.source_length,
        memory=None if options.memory is None else memory_bytes(options.memory),
        **options.trust,
    )
    out, err = make_consoles(options.color)
    if options.format == "text":
        for line in plan_lines(report, out.width if out.is_terminal else None):
            out.print(line)
    else:
        rows = [[layer[name] for name in COLUMNS] for layer in report["layers"]]
        sys.stdout.write(report_text(report, options.format, COLUMNS, rows))
    sys.stdout.flush()
    for note in report["plan"]["notes"]:
        err.print(visible(f"note: {note}"), style="dim")
    return int(Exit.CHECK if report["plan"]["fits"] is False else Exit.DONE)


class Size(NamedTuple):
    """The size of a run: `rows` in all, `length` columns of each, `source` columns of an encoder.

    With `grouped` the rows of a prompt share one row of cross-attention, in a batch of several prompts too.
    """

    batch: int
    rows: int
    length: int
    source: int = 0
    grouped: bool = False


class Part(NamedTuple):
    """A layer's keys and values, its cross-attention, or its recurrent state."""

    entry: Mapping[str, Any]  # of `Cache.describe`, for a few columns of one row
    cell: int  # bytes of one column of one row; of one row where there are no columns

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> Part:
        """The part of an entry for one row."""
        return cls(entry, entry["bytes"] // (1 if entry["kind"] == STATE else max(entry["shape"][2], 1)))

    @property
    def window(self) -> int | None:
        """The columns that a window keeps; None if all stay, as in a window of 1 (see `decode.cut_windows`)."""
        window = self.entry.get("window")
        return None if window in (None, 1) else int(window) - 1

    def stored(self, size: Size) -> tuple[int, int]:
        """Stored rows and columns; a state has one column."""
        if self.entry["kind"] == STATE:
            return size.rows, 1
        if self.entry["kind"] == CROSS:
            return size.batch if size.grouped or size.batch == 1 else size.rows, size.source
        return size.rows, size.length if self.window is None else min(size.length, self.window)

    def bytes(self, size: Size) -> int:
        """All bytes of the part, scales of quantised numbers included."""
        rows, columns = self.stored(size)
        return rows * columns * self.cell

    def reserved(self, size: Size) -> int:
        """The most bytes of its buffers, room for later tokens included."""
        if self.entry["kind"] in (STATE, CROSS, "static"):
            return self.bytes(size)
        from genctl.decode.batch_cache import ROOM
        from genctl.decode.cache.growing import STEP, grown

        # up to ROOM new tokens are allocated at the beginning; beyond them a buffer grows as it fills
        columns = size.length if size.length <= ROOM + 1 else grown(size.length)
        return size.rows * (columns if self.window is None else min(columns, self.window + STEP)) * self.cell

    def sized(self, size: Size, device: str) -> dict[str, Any]:
        """The part as an entry of `describe` in a run of this size."""
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
    """The report of a plan, with the keys of a measured one, and `plan`: the request, and what fits.

    `batch` prompts, each with the rows of the strategy; `length` columns of each row, the prompt's included (default:
    the model's context); `source_length` tokens of an encoder (default: its context, or `length`); `memory` in bytes.
    `reserved_bytes` is the most that the buffers take, room for later tokens included: exact at the end of a run with
    at most 512 new tokens, else an upper bound. Raises UsageError for conflicting options, ModelError for a model that
    cannot be planned.
    """
    per_prompt = rows_of(generation)
    from genctl.commands.inspect import skeleton as skeletons

    form = generation.cache_implementation if generation.use_cache else "off"
    skeleton = skeletons.read(runtime, form, **trust)
    parts, weights = [Part.of(entry) for entry in skeleton.cache], skeleton.weights
    context, length, source = _lengths(skeleton, length, source_length)
    size = Size(batch, batch * per_prompt, length, source or 0, grouped=skeleton.is_native)
    in_all = total(parts, size)

    longest = largest_batch = fits = None
    if memory is not None:
        room = memory - weights
        longest = largest(lambda length: total(parts, size._replace(length=length)) <= room, context)
        largest_batch = largest(lambda batch: total(parts, size._replace(batch=batch, rows=batch * per_prompt)) <= room)
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
            "notes": [*skeleton.notes, *_notes(skeleton, generation, size, form)],
        },
    }


def rows_of(generation: Generation) -> int:
    """Rows that the strategy keeps for each prompt. Raises UsageError for conflicting knobs."""
    check_search(generation)
    if generation.num_beams > 1:
        return generation.num_beams
    if samples := generation.best_of or generation.mbr_samples:
        return samples
    if generation.penalty_alpha:
        return generation.top_k  # contrastive search reads each candidate in a row of its own
    return generation.num_return_sequences


def largest(fits: Callable[[int], bool], most: int | None = None) -> int | None:
    """The largest whole number from 0 to `most` that fits, for a monotonic `fits`; None if all fit.

    Without `most` numbers up to 2^62 are tried. 0 is not tried: it is the result if 1 does not fit.
    """
    numbers = range(1, (1 << 62 if most is None else most) + 1)
    found = bisect_left(numbers, True, key=lambda number: not fits(number))
    return most if found == len(numbers) else found


def _lengths(skeleton: Skeleton, length: int | None, source: int | None) -> tuple[int | None, int, int | None]:
    """The context, the planned length, and that of the source. Raises UsageError for what the model cannot have."""
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


def _notes(skeleton: Skeleton, generation: Generation, size: Size, form: str) -> list[str]:
    """Notes on settings that a run follows and this plan does not, and on memory that it does not count."""
    notes, settings = [], skeleton.settings
    for name in ("num_beams", "num_return_sequences"):
        stored = settings.values.get(name)
        if type(stored) is int and stored > 1 and getattr(generation, name) == 1:
            notes.append(f"{settings.file} says {name} = {stored}, which a run follows; this plan has {name} = 1")
    kinds = {entry["kind"] for entry in skeleton.cache}
    if not kinds and form != "off":
        notes.append("this architecture keeps no cache: everything is read again at every step")
    if size.rows > size.batch and size.length > SHARED and "full" in kinds and size.source == 0:
        shared = f"the native runtime keeps a prompt of {SHARED} tokens or more once for all its rows"
        notes.append(f"{shared}: a run may need less")
    if form == "offloaded":
        notes.append("with --cache offloaded the layers that grow lie in the CPU's memory while others compute")
    others = [name for name in ("assistant_model", "amateur_model") if getattr(generation, name)]
    if others:
        notes.append(f"the weights and the cache of {' and '.join(others)} are not counted")
    if generation.guidance_scale not in (None, 1.0):
        notes.append("guidance_scale keeps a second cache for the negative prompt, which is not counted")
    if generation.assistant_model or generation.prompt_lookup_num_tokens or generation.assistant_early_exit:
        notes.append("drafts, and what they push out of windows, stay until they are checked; this is not counted")
    return notes
