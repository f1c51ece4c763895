"""A side whose rows were decoded by two runs: one that was interrupted, and one that continues it with `--resume`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from torch import Tensor

from genctl.commands.job import SPAN
from genctl.config.layers import Resolved
from genctl.engines.local.session import Session
from genctl.engines.protocol import never
from genctl.engines.requests import Request
from genctl.parity.sides import LocalSide, ReceiveLogits
from genctl.parity.values import Text

Interrupted: TypeAlias = Callable[[], str]


class ResumedSide(LocalSide):
    """The first `done` rows are those of an earlier run, the others those of a later one.

    Rows are computed in groups. The later run begins with the group of the first row that is missing, and computes
    those of its rows again that are there.
    """

    def __init__(
        self, name: str, session: Session, resolved: Resolved, *, width: int, ids: Sequence[str], done: int
    ) -> None:
        super().__init__(name, session, resolved, width=width)
        span = SPAN * width
        self._done = frozenset(ids[:done])
        self._earlier = frozenset(ids[: -(-done // span) * span])  # whole groups
        self._later = frozenset(ids[done - done % span :])

    def read(
        self, texts: Sequence[Text], receive: ReceiveLogits, *, interrupted: Interrupted = never
    ) -> dict[str, str]:
        """As the two runs read them."""
        failed: dict[str, str] = {}
        for run, is_earlier in ((self._earlier, True), (self._later, False)):
            places = [place for place, text in enumerate(texts) if text.id in run]
            kept = {place for place in places if (texts[place].id in self._done) is is_earlier}

            def keep(
                number: int, index: int, logits: Tensor, places: list[int] = places, kept: set[int] = kept
            ) -> None:
                if places[number] in kept:
                    receive(places[number], index, logits)

            failed |= super().read([texts[place] for place in places], keep, interrupted=interrupted)
        return failed

    def write(
        self, requests: Sequence[Request], *, interrupted: Interrupted = never
    ) -> tuple[list[Text], dict[str, str]]:
        """As the two runs write them."""
        earlier, lost = super().write([one for one in requests if one.id in self._earlier], interrupted=interrupted)
        later, more = super().write([one for one in requests if one.id in self._later], interrupted=interrupted)
        written = {text.id: text for text in later} | {text.id: text for text in earlier if text.id in self._done}
        return [written[one.id] for one in requests if one.id in written], {**more, **lost}
