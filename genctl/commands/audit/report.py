"""`--report` of `genctl audit`: the verdict, all hypotheses, and the worst row before and after the explanation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from genctl.commands.audit import view
from genctl.commands.page_file import ReportPage
from genctl.errors import percent
from genctl.parity.audit_values import Audit
from genctl.terminal.widgets import visible

MOST = 60  # hypotheses
LONGEST = 2000  # tokens of a row


class AuditPage(ReportPage):
    """The page in the making."""

    def take(self, one: Audit, piece: view.Piece, facts: Sequence[tuple[str, str]]) -> None:
        """The audit is done."""
        self._found, self._piece, self._facts = one, piece, facts

    def content(self) -> bytes:
        """The page in UTF-8. Every text in it is escaped by the template."""
        one = self._found
        facts = [
            ("trace", one.trace), ("reference", one.reference), ("rows", f"{len(one.texts):,}"),
            ("tokens", f"{len(one.positions):,}"), *self._facts,
        ]  # fmt: skip
        return self.filled(
            "audit.html.jinja",
            f"Audit of {visible(one.trace)}",
            facts,
            verdict=one.verdict,
            reason=visible(one.reason),
            remarks=[*map(visible, (*(each.advice for each in one.causes), *one.notes, *one.failed.values()))],
            tried=[
                {
                    "words": visible(each.words), "percent": percent(max(each.explained, 0.0)),
                    "share": f"{100 * min(max(each.explained, 0.0), 1.0):.1f}",
                    "likelihood": f"{each.log_likelihood:.1f}", "ratio": f"{each.ratio:.3g}",
                }
                for each in one.tried[:MOST]
            ],
            strips=[self._strip(label, name) for label, name in view.strips(one)],
        )  # fmt: skip

    def _strip(self, label: str, name: str) -> dict[str, Any]:
        pieces = []
        for each in view.worst_row(self._found)[:LONGEST]:
            ratio = getattr(each, name)
            about = f"token {each.index + 1}: {ratio:.3g} times noise"
            text = self._piece(each.token) or f"‹id {each.token}›"
            pieces.append({"text": visible(text), "level": view.LEVELS.digit(ratio), "about": about})
        return {"name": f"The row that differs most, {label}", "pieces": pieces}
