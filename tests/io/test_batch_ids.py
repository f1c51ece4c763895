"""An id that is used twice is found, in little memory."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genctl.io.jsonl import UsedIds
from genctl.io.rows import RefusedRow

NAMES = st.none() | st.integers(0, 30).map(str) | st.sampled_from(["a", "b", "é", "01", "+1", "-1", "٣"])


@settings(max_examples=300, deadline=None)
@given(st.lists(NAMES, max_size=30))
def test_as_a_dictionary_of_all_ids_would_have_it(names: list[str | None]) -> None:
    ids, used = UsedIds(), dict[str, int]()
    for index, name in enumerate(names):
        wanted = str(index) if name is None else name
        if wanted in used:
            with pytest.raises(RefusedRow, match=rf"is already used in line {used[wanted] + 1}$"):
                ids.claim(name, index)
        else:
            ids.claim(name, index)
            used[wanted] = index


def test_a_hundred_thousand_ids_take_a_few_megabytes_and_are_all_known() -> None:
    ids = UsedIds()
    for index in range(100_000):
        ids.claim(f"row {index}", index)
    assert sys.getsizeof(ids._rows) <= 100_000 * 64
    for index in (0, 1, 511, 512, 513, 65_535, 99_999):
        with pytest.raises(RefusedRow, match=f"already used in line {index + 1}$"):
            ids.claim(f"row {index}", 100_000 + index)
