"""A pytest plugin: `genctl_golden` and `genctl_parity`, gates that say when they were skipped.

Nothing of genctl beside this module is imported until a test uses one of the fixtures.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from genctl.commands.parity.golden_file import GoldenOutcome
    from genctl.parity.values import Parity

FIXTURES = {"genctl_golden", "genctl_parity"}
FOLDER = "goldens"  # beside the test
_NAME = re.compile(r"\w[\w.-]{0,99}")
GATE, LINE = "genctl gate", "genctl"  # properties of tests, which are in reports, also in those of other processes


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--genctl-update`."""
    parser.getgroup("genctl").addoption(
        "--genctl-update",
        action="store_true",
        help="write golden files that are missing",
    )


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests that are gates."""
    if not FIXTURES.isdisjoint(getattr(item, "fixturenames", ())):
        item.user_properties.append((GATE, ""))


@pytest.fixture
def genctl_golden(request: pytest.FixtureRequest) -> Callable[..., GoldenOutcome]:
    """`genctl_golden(name, side, prompts)`: whether a side agrees with goldens/NAME.jsonl beside the test."""

    def golden(name: str, side: str, prompts: Sequence[str], *, max_new_tokens: int = 32) -> GoldenOutcome:
        __tracebackhide__ = True
        if not _NAME.fullmatch(name):
            pytest.fail(f"golden {name!r}: a name has letters, digits and . - _", pytrace=False)
        path = request.path.parent / FOLDER / f"{name}.jsonl"
        update = bool(request.config.getoption("--genctl-update"))
        from genctl.commands.parity.golden_file import check_golden

        outcome: GoldenOutcome = _plain(
            lambda: check_golden(path, side, prompts, update=update, max_new_tokens=max_new_tokens)
        )
        if not outcome:
            request.node.add_report_section("call", "genctl", outcome.words)
        if outcome.parity is None:
            request.node.user_properties.append((LINE, outcome.words))
        return outcome

    return golden


@pytest.fixture
def genctl_parity() -> Callable[..., Parity]:
    """`genctl_parity(reference, other, prompts)`: the `Parity` of two sides."""

    def parity(reference: str, other: str, prompts: Sequence[str], *, max_new_tokens: int = 32) -> Parity:
        __tracebackhide__ = True
        from genctl.commands.parity.golden_file import compare

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


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print which gates were skipped or not selected, and what was written."""
    lines = []
    for kind, found in terminalreporter.stats.items():  # reports, and the tests that were not selected
        for each in found:
            properties = getattr(each, "user_properties", ())
            if (GATE, "") in properties and kind == "deselected":
                lines.append(f"deselected: {each.nodeid}")
            elif (GATE, "") in properties and each.skipped:
                reason = each.longrepr[2] if isinstance(each.longrepr, tuple) else getattr(each, "wasxfail", "")
                lines.append(f"skipped: {each.nodeid}: {str(reason).removeprefix('Skipped: ')}")
            elif getattr(each, "when", "") == "teardown":
                lines += [words for name, words in properties if name == LINE]
    if lines:
        terminalreporter.section("genctl")
        for line in lines:
            terminalreporter.line(line)
