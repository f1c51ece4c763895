"""`genctl audit`: what is shown and written of an audit, which is done once."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from genctl.parity.audit import Auditor
from genctl.parity.audit_values import Audit
from tests.cli.tool import genctl
from tests.commands.audit.traces import MARKS, PROMPTS, STORIES, audit, auditor, doubled, rollouts, written

pytestmark = MARKS


@cache
def _found() -> Audit:
    return auditor(rollouts(read=doubled)).run("trace")


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A trace with a double BOS, whose audit is known."""
    found = _found()
    monkeypatch.setattr(Auditor, "run", lambda auditor, name: replace(found, trace=name))
    return written(tmp_path, rollouts(read=doubled))


@pytest.mark.parametrize("width", [60, 80])
def test_a_terminal_shows_bars_and_the_worst_row(
    width: int, trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    words = "-m", str(STORIES), "--report", str(tmp_path / "page.html")
    done = genctl("audit", trace, *words, terminal=True, color="never")
    assert done.status == 4
    lines = done.out.splitlines()
    assert all(len(line) <= width for line in lines)
    assert "explained: double BOS (" in done.out
    assert "██████████  100.0%  double BOS" in done.out
    assert {"before", "after"} <= {line.strip() for line in lines}
    page = (tmp_path / "page.html").read_text()
    assert "double BOS" in page
    assert "<script" not in page


def test_records_have_hypotheses_and_positions(trace: str) -> None:
    done = audit(trace, "--positions", "--allow", "bos-doubled")
    assert done.status == 0
    kinds = [record["kind"] for record in done.records]
    assert kinds[0] == "audit"
    assert kinds.count("position") == 15 * len(PROMPTS)
    assert kinds.count("hypothesis") > 20
    table = genctl("audit", trace, "-m", str(STORIES), "--format", "tsv", "-q")
    assert table.out.splitlines()[1].split("\t")[3:5] == ["explained", "bos-doubled"]


def test_a_trace_that_nothing_explains_may_pass(trace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = replace(_found(), verdict="unexplained", causes=())
    monkeypatch.setattr(Auditor, "run", lambda auditor, name: found)
    done = audit(trace)
    assert (done.status, done.err.splitlines()[-1]) == (4, "hint: --allow unexplained passes it")
    assert audit(trace, "--allow", "unexplained").status == 0
