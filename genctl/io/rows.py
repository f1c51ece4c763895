"""One row of a batch: a prompt, or why it cannot be used; and the seed that reproduces it alone."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field
from typing import Any

from genctl.events import conversation, row_name

SCHEMA = "genctl/1"  # of records


class RefusedRow(Exception):
    """A row that cannot be used, and why. It becomes a `BadRow` and never leaves this package."""


@dataclass(frozen=True, slots=True)
class InputRow:
    """A prompt. Exactly one of `prompt`, `prompt_ids` and `messages` is set, and it is not empty."""

    id: str
    index: int  # position in the input from 0, bad rows counted
    prompt: str | None = None
    prompt_ids: tuple[int, ...] | None = None  # each in [0, 2**63); checked against the vocabulary elsewhere
    messages: tuple[dict[str, Any], ...] | None = None  # {"role", "content"}, or with `tool_calls`: see `jsonl`
    params: dict[str, Any] = field(default_factory=dict)  # as written; checked where the knobs are known
    extra: dict[str, Any] = field(default_factory=dict)  # reference, prefix, system, negative_prompt, tools
    columns: dict[str, Any] = field(default_factory=dict)  # other keys, copied to `input` of its records
    where: str = ""  # "prompts.jsonl, line 17"
    own_id: bool = False  # the id is from the input; else it is the index

    @property
    def name(self) -> str:
        """What messages call the row: its own id, else its place in the input."""
        return row_name(self.id, self.place)

    @property
    def place(self) -> int:
        """The place in the input, from 1; 0 if the row has its own id."""
        return 0 if self.own_id else self.index + 1

    @property
    def shown(self) -> str:
        """The prompt as readable text; "" for token ids."""
        return self.prompt or conversation(self.messages or ())


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be used. `message` is a complete sentence that names the line."""

    id: str
    index: int
    where: str
    code: str
    message: str  # "line 17: not JSON: …": it includes `where`
    own_id: bool = False
    columns: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What messages call the row: its own id, else its place in the input."""
        return row_name(self.id, 0 if self.own_id else self.index + 1)


def random_seed() -> int:
    """A seed below 2**32, short enough to type."""
    return secrets.randbelow(2**32)


def row_seed(seed: int, id: str, index: int) -> int:
    """The seed of one row: the run's `seed` for the first row (index 0), a mix of `seed` and the row's id for others.

    The mix is the BLAKE2b hash of `"{seed}\\0{id}"` cut to 53 bits, which every JSON parser preserves. It does not
    depend on the order of the rows or the batch size. Each row's seed is in its record: a single prompt with
    that `--seed` is a first row, so it samples the same tokens.
    """
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}\0{id}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") & (2**53 - 1)
