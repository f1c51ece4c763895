"""Text cut at stop strings: a finished one (`trim`) and one that is still growing (`HoldBack`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from itertools import islice


def trim(text: str, stops: Sequence[str], keep: bool = False) -> tuple[str, str]:
    """Cut `text` where the earliest stop string begins; of several that begin there, the longest counts.

    Returns the text before it (with it, if `keep`) and the stop string, which is empty when none occurs. Empty stop
    strings are ignored.
    """
    matches = [(at, -len(stop), stop) for stop in stops if stop and (at := text.find(stop)) >= 0]
    if not matches:
        return text, ""
    at, _, stop = min(matches)
    return text[: at + len(stop) if keep else at], stop


class HoldBack:
    """Releases the part of a growing text that no stop string can still remove.

    The concatenated results of `push` and `flush` are `trim(text, stops, keep)[0]` of the pushed text. The amortised
    cost per character is constant.
    """

    def __init__(self, stops: Sequence[str], keep: bool = False) -> None:
        self._automaton = _automaton(tuple(stop for stop in dict.fromkeys(stops) if stop))
        self._keep = keep
        self._held: deque[str] = deque()  # characters read and not yet released
        self._read = 0  # characters read
        self._state = 0
        self._match: tuple[int, int] | None = None  # where the earliest stop string so far begins and ends
        self._done = False

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found; after that only the stop string itself may be released (with `keep`)."""
        return self._match is not None

    def push(self, text: str) -> str:
        """Append `text`; return the text that can be shown now."""
        if self._done:
            return ""
        if len(self._automaton.depth) == 1:
            return text
        depth, longest = self._automaton.depth, self._automaton.longest
        for character in text:
            self._state = self._automaton.step(self._state, character)
            self._held.append(character)
            self._read += 1
            if length := longest[self._state]:
                start = self._read - length
                if self._match is None or start <= self._match[0]:
                    self._match = start, self._read
            # a longer stop string that began earlier or at the same place may still be incomplete
            if self._match is not None and self._read - depth[self._state] > self._match[0]:
                return self.flush()
        return self._release(self._read - depth[self._state])

    def flush(self) -> str:
        """End the text; return the rest that can be shown."""
        if self._done:
            return ""
        self._done = True
        end = self._read if self._match is None else self._match[1 if self._keep else 0]
        released = self._release(end)
        self._held.clear()
        return released

    def fork(self) -> HoldBack:
        """An independent copy in the same state."""
        twin = HoldBack((), self._keep)
        twin._automaton, twin._held = self._automaton, self._held.copy()
        twin._read, twin._state, twin._match, twin._done = self._read, self._state, self._match, self._done
        return twin

    def _release(self, end: int) -> str:
        count = end - (self._read - len(self._held))
        released = "".join(islice(self._held, count))
        for _ in range(count):
            self._held.popleft()
        return released


class _Automaton:
    """Aho and Corasick's automaton (doi:10.1145/360825.360855): searches all stop strings in one pass."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.depth = [0]  # characters of a stop string that each state has seen
        self.longest = [0]  # length of the longest stop string that ends in each state
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        for stop in stops:
            state = 0
            for character in stop:
                if character not in self._next[state]:
                    self._next[state][character] = len(self._next)
                    self._next.append({})
                    self._fail.append(0)
                    self.depth.append(self.depth[state] + 1)
                    self.longest.append(0)
                state = self._next[state][character]
            self.longest[state] = len(stop)
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            self.longest[state] = self.longest[state] or self.longest[self._fail[state]]
            for character, child in self._next[state].items():
                self._fail[child] = self.step(self._fail[state], character)
                queue.append(child)

    def step(self, state: int, character: str) -> int:
        while state and character not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(character, 0)


@lru_cache(maxsize=64)
def _automaton(stops: tuple[str, ...]) -> _Automaton:
    return _Automaton(stops)
