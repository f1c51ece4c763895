"""Results in any order come out in input order, each row once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genctl.io.record_output import RecordOutput
from genctl.io.writers import Ordered


class Listed:
    def __init__(self) -> None:
        self.ids: list[str] = []
        self.closed = 0

    def write(self, record: Mapping[str, Any]) -> None:
        self.ids.append(record["id"])

    def close(self) -> None:
        self.closed += 1


@settings(max_examples=150, deadline=None)
@given(st.permutations(range(8)), st.booleans(), st.integers(0, 3))
def test_rows_come_out_in_input_order_as_early_as_they_can(order: list[int], unordered: bool, start: int) -> None:
    listed = Listed()
    written: list[int] = []
    ordered = Ordered(
        listed, unordered=unordered, start=start, written=lambda index, records: written.append(index - start)
    )
    for count, index in enumerate(order, 1):
        ordered.put(start + index, [{"id": f"{index}a"}, {"id": f"{index}b"}])
        seen = set(order[:count])
        ready = next(number for number in range(9) if number not in seen)
        wanted = order[:count] if unordered else list(range(ready))
        assert listed.ids == [f"{number}{part}" for number in wanted for part in "ab"]
        assert ordered.held == count - len(wanted)
        assert written == wanted, "each row is counted once, when it is written"
    ordered.close()
    assert listed.closed == 1


@pytest.mark.parametrize("unordered", [False, True])
def test_a_row_put_twice_or_never_is_a_mistake(unordered: bool) -> None:
    ordered = Ordered(Listed(), unordered=unordered)
    ordered.put(0, [{"id": "0"}])
    ordered.put(2, [{"id": "2"}])
    for index in (0, 2, -1):
        with pytest.raises(RuntimeError, match=f"row {index} was put twice"):
            ordered.put(index, [{"id": "x"}])
    with pytest.raises(RuntimeError, match="row 3 has no record"):
        ordered.put(3, [])
    with pytest.raises(RuntimeError, match="row 1 is missing"):
        ordered.close()


@pytest.mark.parametrize("early", [(), (2,), (3,), (2, 3), (3, 2)])
def test_an_output_that_stops_at_a_row_ends_with_it(early: tuple[int, ...]) -> None:
    """Rows after it have finished before it fails."""
    listed = Listed()
    output = RecordOutput(listed)
    for index in (0, *early):
        output.put(index, [{"id": str(index)}])
    output.stop(1, [{"id": "1"}])
    output.close(cut_short=False)
    assert listed.ids == ["0", "1"]


def test_a_run_cut_short_writes_what_it_held_in_order() -> None:
    listed = Listed()
    ordered = Ordered(listed)
    for index in (4, 0, 2):
        ordered.put(index, [{"id": str(index)}])
    ordered.close(partial=True)
    assert listed.ids == ["0", "2", "4"]
    assert listed.closed == 1


def test_a_signal_between_the_records_of_a_row_loses_none() -> None:
    class Interrupting(Listed):
        def write(self, record: Mapping[str, Any]) -> None:
            super().write(record)
            if record["id"] == "0a":
                raise KeyboardInterrupt

    listed = Interrupting()
    ordered = Ordered(listed)
    with pytest.raises(KeyboardInterrupt):
        ordered.put(0, [{"id": "0a"}, {"id": "0b"}])
    ordered.close(partial=True)
    assert listed.ids == ["0a", "0b"]
