"""Seeds: one for the run, and one derived from it for each row, so that any row can be repeated alone."""

from __future__ import annotations

import hashlib
import secrets


def random_seed() -> int:
    """A seed below 2**32, short enough to type."""
    return secrets.randbelow(2**32)


def row_seed(seed: int, id: str, index: int) -> int:
    """The seed of one row: the run's `seed` for the first row (index 0), a mix of `seed` and the row's id for others.

    The mix is the BLAKE2b hash of `"{seed}\\0{id}"` cut to 53 bits, which every reader of JSON keeps, and does not
    depend on the order of the rows or the batch size. Each row's seed is in its record: a single prompt with
    that `--seed` is a first row, so it draws the same tokens.
    """
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}\0{id}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") & (2**53 - 1)
