"""A pytest plugin: `genctl_golden` and `genctl_parity`, gates that say when they were skipped.

Nothing of genctl beside this module is imported until a test uses one of the fixtures.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from genctl.commands.parity.gate import GoldenOutcome
    from genctl.parity.values import Parity

FIXTURES = {"genctl_golden", "genctl_parity"}
FOLDER = "goldens"  # beside the test
_NAME = re.compile(r"\w[\w.-]{0,99}")
_LINE = "genctl_line"  # the attribute of a report, which also comes from another process

_lines = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--genctl-update`."""
    parser.getgroup("genctl").addoption(
        "--genctl-update",
        action="store_true",
        help="write golden files that are missing, and rewrite those from which every difference is a tie",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Start without lines for the summary."""
    config.stash[_lines] = []


@pytest.fixture
def genctl_golden(request: pytest.FixtureRequest) -> Callable[..., GoldenOutcome]:
    """`genctl_golden(name, side, prompts)`: whether a side agrees with goldens/NAME.jsonl beside the test."""

    def golden(name: str, side: str, prompts: Sequence[str], *, max_new_tokens: int = 32) -> GoldenOutcome:
        __tracebackhide__ = True
        if not _NAME.fullmatch(name):
            pytest.fail(f"golden {name!r}: a name has letters, digits and . - _", pytrace=False)
        path = request.path.parent / FOLDER / f"{name}.jsonl"
        update = bool(request.config.getoption("--genctl-update"))
        from genctl.commands.parity.gate import check_golden

        outcome: GoldenOutcome = _plain(
            lambda: check_golden(path, side, prompts, update=update, max_new_tokens=max_new_tokens)
        )
        if not outcome:
            request.node.add_report_section("call", "genctl", outcome.words)
        if update:
            request.node.stash.setdefault(_lines, []).append(outcome.words)
        return outcome

    return golden


@pytest.fixture
def genctl_parity() -> Callable[..., Parity]:
    """`genctl_parity(reference, other, prompts)`: the `Parity` of two sides."""

    def parity(reference: str, other: str, prompts: Sequence[str], *, max_new_tokens: int = 32) -> Parity:
        __tracebackhide__ = True
        from genctl.commands.parity.gate import compare

        found: Parity = _plain(lambda: compare(reference, other, prompts, max_new_tokens))
        return found

    return parity


def _plain(work: Callable[[], Any]) -> Any:
    """The result of `work`; a GenctlError fails the test with its message, without a traceback."""
    __tracebackhide__ = True
    from genctl.errors import GenctlError

    try:
        return work()
    except GenctlError as error:
        failure = error
    hint = f"\nhint: {failure.hint}" if failure.hint else ""
    return pytest.fail(f"{failure.message}{hint}", pytrace=False)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, None]:
    """Note gates that are skipped, and golden files that are written, in the report of a test."""
    outcome = yield
    if FIXTURES.isdisjoint(getattr(item, "fixturenames", ())):
        return
    report: pytest.TestReport = outcome.get_result()
    if report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else getattr(report, "wasxfail", "")
        setattr(report, _LINE, f"skipped: {item.nodeid}: {str(reason).removeprefix('Skipped: ')}")
    elif report.when == "teardown" and (words := item.stash.get(_lines, [])):
        setattr(report, _LINE, "; ".join(words))


def pytest_deselected(items: Iterable[pytest.Item]) -> None:
    """Note gates that were not selected."""
    for item in items:
        if not FIXTURES.isdisjoint(getattr(item, "fixturenames", ())):
            item.config.stash[_lines].append(f"deselected: {item.nodeid}")


class _Listener:
    """Collects the lines of reports, also of those from other processes."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take the line of a report."""
        if line := getattr(report, _LINE, ""):
            self._lines.append(line)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Register the collector of lines."""
    session.config.pluginmanager.register(_Listener(session.config.stash[_lines]), "genctl-gates")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print which gates were skipped, and what was written."""
    if lines := config.stash[_lines]:
        terminalreporter.section("genctl")
        for line in lines:
            terminalreporter.line(line)
