"""A run that is interrupted says so, also where rows have failed before."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from genctl.commands.job import Job
from tests.cli.tool import genctl

ROWS = '{"prompt": 3}\n{"prompt": "12"}\n'
COMMANDS = {
    "run": ("run", "-m", "builtin:numbers"),
    "beam": ("beam", "-m", "builtin:numbers"),
    "chat": ("chat", "-m", "builtin:numbers"),
    "compare": ("compare", "-m", "builtin:numbers", "--strategy", "a:", "--strategy", "b:num_beams=2"),
    "score": ("score", "-m", "builtin:stories"),
    "inspect-cache": ("inspect-cache", "-m", "builtin:numbers", "--steps", "1"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_status_is_that_of_the_signal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal comes while the last results are written."""
    words = (*COMMANDS[name], "--input-format", "jsonl")
    assert genctl(*words, stdin=ROWS).status == 1, "a row fails"
    before = Job.outputs
    for number in (130, 143):

        def outputs(job: Any, number: int = number) -> AbstractContextManager[ExitStack]:
            job.messages.close = lambda: setattr(job.interrupt, "status", number)  # the last thing before the status
            return before(job)

        monkeypatch.setattr(Job, "outputs", outputs)
        assert genctl(*words, stdin=ROWS).status == number


@pytest.mark.parametrize(("status", "failed"), [(0, True), (130, False)])
def test_an_engine_that_is_interrupted_has_not_failed(status: int, failed: bool) -> None:
    """Ray's logs are kept after a failure, and not after a signal."""
    told: dict[str, bool] = {}
    job: Any = SimpleNamespace(
        loaded=SimpleNamespace(close=lambda **how: told.update(how)), interrupt=SimpleNamespace(status=status)
    )
    Job.close_engine(job, failed=True)
    assert told == {"hurried": bool(status), "failed": failed}
