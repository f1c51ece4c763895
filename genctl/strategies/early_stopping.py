"""When a beam search ends: transformers' three meanings of `early_stopping`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from genctl.decode.types import FinishedRow

EarlyStopping: TypeAlias = bool | Literal["never"]


@dataclass(frozen=True)
class EarlyStoppingRule:
    """Compares the results with the best score that a live row may still reach."""

    length_penalty: float
    early_stopping: EarlyStopping
    longest: int  # new tokens that a row may have

    def reached(self, results: Sequence[FinishedRow], capacity: int, best: float, written: int) -> bool:
        """Whether there are `capacity` results and a row with the total `best` is not expected to beat the worst.

        The rows have `written` new tokens. With `early_stopping` False the row is assumed to end now, as in
        transformers; "never" assumes the length with the best possible score.
        """
        if len(results) < capacity:
            return False
        if self.early_stopping is True:
            return True
        length = self.longest if self.early_stopping == "never" and self.length_penalty > 0 else written
        hope = float(best / length**self.length_penalty)
        return hope <= min(result.score(self.length_penalty) for result in results)
