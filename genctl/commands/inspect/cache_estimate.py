"""`--plan`: the size of a cache, computed from a config alone, and the sizes that fit into memory beside the weights.

Each part of the cache is built once for a few tokens on the meta device (`skeleton.probe`). Its bytes are then
rows x columns x the bytes of one column of one row; how many rows and columns there are depends on its kind:

    full, static, quantised   all rows, all columns
    sliding window            all rows, the newest window - 1 columns
    cross-attention           the source's columns; one row for a prompt, however many beams it has (with transformers'
                              classes, where there are several prompts, all rows)
    recurrent state           all rows, no columns

so an estimate equals what `inspect-cache` measures for as many rows and columns, to the byte.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from genctl.commands.inspect.measurement import CROSS, STATE, divided
from genctl.config.modes import check_distinct, check_returned
from genctl.errors import UsageError
from genctl.io.records import SCHEMA
from genctl.models.sizes import context_of, source_context_of, trained_length
from genctl.params import Generation, Runtime

if TYPE_CHECKING:
    from genctl.commands.inspect.skeleton import Skeleton

STATIC = "static"
SHARED = 64  # least columns of a prompt that its rows share (`decode.cache.shared`), in the native runtime


@dataclass(frozen=True)
class Size:
    """The size of a run: `rows` in all, `length` columns of each, `source` columns of an encoder.

    With `grouped` the rows of a prompt share one row of cross-attention, in a batch of several prompts too.
    """

    batch: int
    rows: int
    length: int
    source: int = 0
    grouped: bool = False


@dataclass(frozen=True)
class Part:
    """One part of the cache: a layer's keys and values, its cross-attention, or its recurrent state."""

    layer: int
    kind: str
    shape: tuple[int, ...]  # of the keys of one row; a state's own shape
    dtype: str
    cell: int  # bytes of one column of one row; of one row where there are no columns
    value_shape: tuple[int, ...] | None = None  # if values have another shape
    window: int | None = None
    states: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @classmethod
    def of(cls, entry: dict[str, Any]) -> Part:
        """The part of an entry of `describe`, for a cache with one row."""
        columns = 1 if entry["kind"] == STATE else entry["shape"][2]
        return cls(
            entry["layer"],
            entry["kind"],
            tuple(entry["shape"]),
            entry["dtype"],
            entry["bytes"] // columns if columns else 0,
            tuple(entry["value_shape"]) if "value_shape" in entry else None,
            entry.get("window"),
            tuple((name, tuple(shape)) for name, shape in entry.get("states", {}).items()),
        )

    def rows(self, size: Size) -> int:
        """Stored rows. The rows of a single prompt share one row of cross-attention."""
        return size.batch if self.kind == CROSS and (size.grouped or size.batch == 1) else size.rows

    def columns(self, size: Size) -> int:
        """Stored columns; 1 for a state, which has none."""
        if self.kind == STATE:
            return 1
        if self.kind == CROSS:
            return size.source
        return size.length if self._kept is None else min(size.length, self._kept)

    @property
    def _kept(self) -> int | None:
        """The columns that a window keeps; None if all stay, as in a window of 1 (see `decode.cut_windows`)."""
        return None if self.window in (None, 1) else int(self.window or 0) - 1

    def bytes(self, size: Size) -> int:
        """All bytes of the part, scales of quantised numbers included."""
        return self.rows(size) * self.columns(size) * self.cell

    def reserved(self, size: Size) -> int:
        """The most bytes of its buffers, room for later tokens included."""
        if self.kind in (STATE, CROSS, STATIC):
            return self.bytes(size)
        from genctl.decode.batch_cache import ROOM
        from genctl.decode.cache.growing import STEP, grown

        # up to ROOM new tokens are allocated at the beginning; beyond them a buffer grows as it fills
        columns = size.length if size.length <= ROOM + 1 else grown(size.length)
        if self._kept is not None:
            columns = min(columns, self._kept + STEP)
        return self.rows(size) * columns * self.cell

    def entry(self, size: Size, device: str) -> dict[str, Any]:
        """The part as an entry of `describe`."""
        entry: dict[str, Any] = {
            "layer": self.layer,
            "kind": self.kind,
            "shape": self._shape(self.shape, size),
            "dtype": self.dtype,
            "device": device,
            "bytes": self.bytes(size),
        }
        if self.value_shape is not None:
            entry["value_shape"] = self._shape(self.value_shape, size)
        if self.kind == STATIC:
            entry["filled"] = size.length
        if self.window is not None:
            entry["window"] = self.window
        if self.states:
            entry["states"] = {name: [self.rows(size), *shape[1:]] for name, shape in self.states}
        return entry

    def _shape(self, shape: tuple[int, ...], size: Size) -> list[int]:
        if self.kind == STATE:
            return [self.rows(size), *shape[1:]]
        return [self.rows(size), shape[1], self.columns(size), *shape[3:]]


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
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """The report of an estimate, with the keys of a measured one, and `plan`: the request, and what fits.

    `batch` prompts, each with the rows of the strategy; `length` columns of each row, the prompt's included (default:
    the model's context); `source_length` tokens of an encoder (default: its context, or `length`); `memory` in bytes.
    `reserved_bytes` is the most that the buffers take, room for later tokens included: exact at the end of a run with
    at most 512 new tokens, else an upper bound. Raises UsageError for conflicting options, ModelError for a model that
    cannot be estimated.
    """
    per_prompt = rows_of(generation)
    from genctl.commands.inspect import skeleton as skeletons

    skeleton = skeletons.build(runtime, allow_pickle=allow_pickle, trust_remote_code=trust_remote_code)
    form = generation.cache_implementation if generation.use_cache else "off"
    parts = [Part.of(entry) for entry in skeletons.probe(skeleton, form)]
    context = context_of(skeleton.config)
    size = _size(skeleton, batch, per_prompt, context, length, source_length)
    size = replace(size, grouped=skeleton.native is not None)
    weights = skeletons.weights_bytes(skeleton, runtime)
    bytes_total = total(parts, size)
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "model": skeleton.name,
        "cache": form,
        "layers": [part.entry(size, skeleton.device) for part in parts],
        "total_bytes": bytes_total,
        "reserved_bytes": sum(part.reserved(size) for part in parts),
        "weights_bytes": weights,
        "bytes_per_token": divided(bytes_total - total(parts, _long(size, size.length - 1)), size.rows),
        "bytes_per_row": divided(bytes_total, size.rows),
        "share_of_weights": bytes_total / weights if weights else None,
        "steps": [],
    }
    report["plan"] = {
        "batch": batch,
        "num_beams": generation.num_beams,
        "rows": size.rows,
        "length": size.length,
        "source_length": size.source if skeleton.is_encoder_decoder else None,
        "dtype": skeleton.dtype,
        "context": context,
        "memory_bytes": memory,
        **_fits(parts, size, per_prompt, weights, memory, context),
        "notes": [*skeleton.notes, *_rows_of_checkpoint(skeleton, generation), *_notes(generation, parts, size, form)],
    }
    return report


def planned_like(
    runtime: Runtime, generation: Generation, report: dict[str, Any], **trust: bool
) -> dict[str, Any] | None:
    """The estimate for as many prompts and columns as a measured report has after its last pass; None without one.

    Raises UsageError or ModelError as `plan` does.
    """
    if not report["steps"] or not report["layers"]:
        return None
    last = report["steps"][-1]
    source = next((layer["shape"][2] for layer in last["layers"] if layer["kind"] == CROSS), None)
    length = last["past_length"] + len(last["input_ids"][0])
    return plan(runtime, generation, batch=len(set(last["rows"])), length=length, source_length=source, **trust)


def rows_of(generation: Generation) -> int:
    """Rows that the strategy keeps for each prompt. Raises UsageError for conflicting knobs."""
    beams, returned = generation.num_beams, generation.num_return_sequences
    if beams > 1:
        check_returned(generation)
        return beams
    samples = generation.best_of or generation.mbr_samples
    if samples is not None:
        return samples
    if generation.penalty_alpha:
        return generation.top_k  # contrastive search reads each candidate in a row of its own
    check_distinct(generation)
    return returned


def largest(fits: Callable[[int], bool], most: int | None = None) -> int | None:
    """The largest whole number from 0 to `most` that fits, for a monotonic `fits`; None if all fit.

    Without `most` numbers up to 2^62 are tried. 0 is not tried: it is the result if 1 does not fit.
    """
    low, high = 0, 1
    bound = 1 << 62 if most is None else most
    while high <= bound and fits(high):
        low, high = high, high * 2
    high = min(high, bound + 1)
    if low == bound or (high > bound and fits(bound)):
        return most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _size(
    skeleton: Skeleton, batch: int, per_prompt: int, context: int | None, length: int | None, source: int | None
) -> Size:
    name = skeleton.name
    if length is None:
        length = context or trained_length(skeleton.config)
        if length is None:
            raise UsageError(f"--plan for {name} needs --length: nothing bounds how long its texts may be")
    if context is not None and length > context:
        raise UsageError(f"--length {length}: the context of {name} is {context} tokens")
    if not skeleton.is_encoder_decoder:
        if source is not None:
            raise UsageError(f"--source-length {source} is for encoder-decoders, and {name} has no encoder")
        return Size(batch, batch * per_prompt, length)
    most = source_context_of(skeleton.config)
    if source is None:
        source = most or length
    if most is not None and source > most:
        raise UsageError(f"--source-length {source}: the encoder of {name} reads {most} tokens at most")
    return Size(batch, batch * per_prompt, length, source)


def _long(size: Size, length: int) -> Size:
    return replace(size, length=length)


def _fits(
    parts: Sequence[Part], size: Size, per_prompt: int, weights: int, memory: int | None, context: int | None
) -> dict[str, Any]:
    """The sizes that fit beside the weights. `length_bound` is the limit of the length: "memory", "context" or None."""
    if memory is None:
        return {"longest_length": None, "length_bound": None, "largest_batch": None, "fits": None}
    room = memory - weights
    longest = largest(lambda length: total(parts, _long(size, length)) <= room, context)
    batch = largest(lambda batch: total(parts, replace(size, batch=batch, rows=batch * per_prompt)) <= room)
    return {
        "longest_length": longest,
        "length_bound": None if longest is None else "context" if longest == context else "memory",
        "largest_batch": batch,
        "fits": total(parts, size) <= room,
    }


def _rows_of_checkpoint(skeleton: Skeleton, generation: Generation) -> list[str]:
    """Rows that a run would have by the checkpoint's own settings, if `generation` has the default."""
    notes = []
    for name in ("num_beams", "num_return_sequences"):
        stored, default = skeleton.generation.values.get(name), getattr(generation, name)
        if type(stored) is int and stored > 1 and default == 1:
            notes.append(
                f"{skeleton.generation.file} says {name} = {stored}, which a run follows; this plan has {name} = 1"
            )
    return notes


def _notes(generation: Generation, parts: Sequence[Part], size: Size, form: str) -> list[str]:
    """Notes on memory that the estimate does not count, or that a run may not need."""
    notes = []
    if not parts and form != "off":
        notes.append("this architecture keeps no cache: everything is read again at every step")
    shares = size.rows > size.batch and size.length > SHARED and any(part.kind == "full" for part in parts)
    if shares and size.source == 0:
        notes.append(
            f"the native runtime keeps a prompt of {SHARED} tokens or more once for all its rows: a run may need less"
        )
    if form == "offloaded":
        notes.append("with --cache offloaded the layers that grow lie in the CPU's memory while others compute")
    others = [name for name in ("assistant_model", "amateur_model") if getattr(generation, name)]
    if others:
        notes.append(f"the weights and the cache of {' and '.join(others)} are not counted")
    if generation.guidance_scale not in (None, 1.0):
        notes.append("guidance_scale keeps a second cache for the negative prompt, which is not counted")
    if generation.assistant_model or generation.prompt_lookup_num_tokens or generation.assistant_early_exit:
        notes.append("a draft is kept, with what it pushes out of windows, until it is checked; this is not counted")
    return notes
