"""`genctl audit`: the views and files of one audit."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from genctl.commands.parity import audit_view
from genctl.commands.recording import PageFile
from genctl.parity.audit import Auditor
from genctl.parity.causes import Audit, AuditPosition
from genctl.parity.values import Text
from tests.cli.tool import genctl
from tests.commands.audit.traces import MARKS, PROMPTS, STORIES, audit, auditor, doubled, rollouts, written
from tests.pages.pages import Parts

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
def test_a_terminal_shows_bars_and_a_page_both_sides(
    width: int, trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    words = "-m", str(STORIES), "--report", str(tmp_path / "page.html")
    done = genctl("audit", trace, *words, terminal=True, color="never")
    assert done.status == 4
    assert all(len(line) <= width for line in done.out.splitlines())
    assert "explained: double BOS (" in done.out
    assert "██████████  100.0%  double BOS" in done.out
    page = Parts((tmp_path / "page.html").read_text())
    facts = " ".join(page.texts)
    assert all(words in facts for words in ("explained: double BOS (", "causes tried", "digest"))
    assert page.data["comparison"]["runs"] == ["reference", "trace"]
    assert [lane["run"] for lane in page.data["lanes"]] == ["reference", "trace"] * len(PROMPTS)
    assert all(("figures" in lane) == (lane["run"] == "trace") for lane in page.data["lanes"])


def test_a_page_leaves_out_tokens_without_a_number_and_says_so(tmp_path: Path) -> None:
    """A page cannot show a missing number: it would appear as a probability of 0."""
    numbers = (-1.0, math.nan, -2.0)
    positions = (AuditPosition("0", at, 5 + at, number, -1.0, 0.5, 0.5, 3.0, 3.0) for at, number in enumerate(numbers))
    text = Text("0", (1,), (5, 6, 7), "A prompt")
    one = Audit("trace", "model", "unexplained", "nothing does", positions=tuple(positions), texts=(text,))
    with PageFile(str(tmp_path / "page.html"), force=False) as page:
        audit_view.add_to_page(page, one, lambda token: f" {token}")
    for lane in Parts((tmp_path / "page.html").read_text()).data["lanes"]:
        assert lane["sequences"][0]["text"] == " 5 7"
    assert lane["figures"] == {"": "differs by up to 3 times noise; 1 token without a number left out"}


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
