"""Memory: a shortage is recognised, what is unused is freed, and so many prompts begin as fit at once."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from genctl import events
from genctl.decode.batch_cache import ROOM
from genctl.decode.cache.growing import STEP
from genctl.decode.cache.layer import CROSS
from genctl.decode.runtime import ModelRuntime, depth_of
from genctl.decode.types import Lane
from genctl.errors import ModelError
from genctl.errors import is_shortage as is_shortage

if TYPE_CHECKING:
    from genctl.decode.lane import LaneState


# -- recognise out-of-memory errors, and free unused memory ------------------------------------------------------------


class OutOfMemory(Exception):
    """A step or a prompt did not fit. `failed_inside_choice`: a search was interrupted there and cannot be resumed."""

    def __init__(self, why: str, *, failed_inside_choice: bool = False) -> None:
        super().__init__(why)
        self.failed_inside_choice = failed_inside_choice

    def without_frames(self) -> OutOfMemory:
        """A copy without the traceback, whose frames hold tensors of what did not fit."""
        return OutOfMemory(str(self), failed_inside_choice=self.failed_inside_choice)


def raise_shortage(error: BaseException, *, failed_inside_choice: bool = False) -> None:
    """Raises OutOfMemory in the place of an exception for a shortage of memory. Another one is left to the caller."""
    if isinstance(error, (MemoryError, RuntimeError)) and is_shortage(error):
        error.__traceback__ = error.__context__ = error.__cause__ = None  # their frames hold tensors of the pass
        why = (str(error).splitlines() or [""])[0][:120]
        raise OutOfMemory(why, failed_inside_choice=failed_inside_choice) from None


@contextmanager
def shortages() -> Iterator[None]:
    """`raise_shortage` for whatever is raised within: around what is not done for each token."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        raise_shortage(error)
        raise


def release() -> None:
    """Free unused memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def too_large(lane: Lane, rows: int, shortage: OutOfMemory) -> events.Failed:
    """The failure of a lane that does not fit alone."""
    tokens = len(lane.tokens) + len(lane.source or ())
    many = f"{rows} rows of it" if rows > 1 else "it alone"
    why = f" ({shortage})" if str(shortage) else ""
    return events.Failed(lane.name, "memory", f"not enough memory for a prompt of {tokens} tokens, {many}{why}")


FILLED = 0.8  # of the free memory of a GPU; the rest is for the arithmetic of a pass
SCORES = 8  # copies of a row's scores that a step makes
SHARE = 0.5  # of free memory; activations and growing buffers need the rest
MOST = {"cpu": 32, "cuda": 256}  # beyond this the time of a pass grows in proportion to its rows


def available(device: torch.device) -> int | None:
    """Free bytes on a device, with those that torch holds and does not use; None if unknown."""
    if device.type == "cuda":
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + held
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def fitting(forward: ModelRuntime, lane: Lane, columns: int) -> int:
    """How many lanes like this one should be decoded at once, if each grows to `columns` tokens.

    One token is read to measure a row's cache.
    """
    most = MOST.get(forward.device.type, 16)
    free = available(forward.device)
    if free is None:
        return min(16, most)
    bytes_of_row = sum(_grown(part, columns) for part in _parts(forward, lane))
    if not bytes_of_row:  # without a cache every pass reads all tokens, so activations grow with the length
        bytes_of_row = columns * _width(forward) * 16
    fits = int(free * SHARE / (bytes_of_row * max(int(lane.strategy.max_rows), 1)))
    return max(1, min(int(most), fits))


def _rows(lane: Lane) -> int:
    return max(int(lane.strategy.max_rows), 1)


def _columns(lane: Lane) -> int:
    """Columns of a row's buffers when it has begun."""
    return -(-(len(lane.tokens) + min(lane.max_new_tokens, ROOM)) // STEP) * STEP


def _width(forward: ModelRuntime) -> int:
    return int(getattr(forward.config.get_text_config(decoder=True), "hidden_size", 1024))


def _grown(part: dict[str, Any], columns: int) -> int:
    """Bytes of a part with so many columns; the free ones of a buffer are measured with the one that was read."""
    if part["kind"] == "recurrent state":
        return int(part["bytes"])
    return int(part["bytes"]) * min(columns, int(part.get("window", columns))) // int(part["shape"][2])


def _parts(forward: ModelRuntime, lane: Lane) -> list[dict[str, Any]]:
    """What the cache of a row holds after one token."""
    source = None if lane.source is None else forward.encode(lane.source[:1])
    prefix = forward.prefill(lane.tokens[:1], source, use_cache=lane.use_cache)
    return [] if prefix.cache is None else prefix.cache.describe()


class MemoryEstimate:
    """How many lanes fit into the free memory of a GPU, before they are tried."""

    def __init__(self, forward: ModelRuntime) -> None:
        self.forward = forward
        self._known: dict[bool, list[dict[str, Any]]] = {}

    def fitting(self, lanes: Sequence[Lane], live: Sequence[LaneState]) -> int:
        """How many of some lanes fit, in order, beside the live ones, whose cache is copied when others join."""
        free = available(self.forward.device)
        if free is None:
            return len(lanes)
        passes = self.forward.forwards
        token = self._token()
        if token and not self._known:  # measuring costs a pass
            columns = sum(state.row_count * state.length for state in live)
            columns += sum((1 + _rows(lane)) * (len(lane.source or ()) + _columns(lane)) for lane in lanes)
            if columns * token + sum(map(self._scores, lanes)) <= free * FILLED:
                return len(lanes)
        left = free * FILLED - sum(state.row_count * self._row(state.lane, state.length) for state in live)
        count = 0
        for lane in lanes:
            left -= self.needs(lane)
            if left < 0:
                break
            count += 1
        self.forward.forwards = passes  # measuring is no work of a lane
        return count

    def needs(self, lane: Lane) -> float:
        """Bytes of a lane: its prompt as it was read, its rows with room for new tokens, and the scores of a step."""
        prompt, rows = self._row(lane, len(lane.tokens)), self._row(lane, _columns(lane))
        return prompt + _rows(lane) * rows + self._scores(lane)

    def _scores(self, lane: Lane) -> int:
        return _rows(lane) * self.forward.vocab_size * 4 * SCORES

    def _token(self) -> int:
        """More than the bytes of a token, by the sizes of the model; 0 if they are not known."""
        try:
            depth = depth_of(self.forward)
        except ModelError:
            return 0
        return 4 * depth * _width(self.forward) * self.forward.dtype.itemsize

    def _row(self, lane: Lane, columns: int) -> float:
        """Bytes of a row's cache with so many columns, and of its source."""
        parts = self._known.get(lane.use_cache)
        if parts is None:
            parts = self._known[lane.use_cache] = _parts(self.forward, lane)
        source = len(lane.source or ())
        found = sum(_grown(part, source if part["kind"] == CROSS else columns) for part in parts)
        return found or columns * _width(self.forward) * 16
