"""A pytest plugin: the fixtures `genctl_golden` and `genctl_parity`.

No other module of genctl is imported until a test uses one of the fixtures.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from genctl.parity.values import Parity

FOLDER = "goldens"  # beside the test
_NAME = re.compile(r"\w[\w.-]{0,99}")
LINE = "genctl"  # a property of tests, which reports carry, also those of worker processes


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option `--genctl-update`."""
    parser.getgroup("genctl").addoption(
        "--genctl-update",
        action="store_true",
        help="write golden files that are missing",
    )


@pytest.fixture
def genctl_golden(request: pytest.FixtureRequest) -> Callable[..., str]:
    """`genctl_golden(name, side, prompts)`: fail unless a side agrees with goldens/NAME.jsonl beside the test.

    Returns the finding, or a note on what was recorded.
    """

    def golden(name: str, side: str, prompts: Sequence[str], *, max_new_tokens: int = 32) -> str:
        __tracebackhide__ = True
        if not _NAME.fullmatch(name):
            pytest.fail(f"golden {name!r}: a name has letters, digits and . - _", pytrace=False)
        path = request.path.parent / FOLDER / f"{name}.jsonl"
        from genctl.commands.parity import golden_file

        if request.config.getoption("--genctl-update") and not path.exists():
            words: str = _plain(lambda: golden_file.write(path, side, prompts, max_new_tokens))
            request.node.user_properties.append((LINE, words))
            return words
        return str(_plain(lambda: golden_file.check(path, side, prompts, max_new_tokens)))

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
    """Print which golden files were written."""
    reports = [each for found in terminalreporter.stats.values() for each in found]
    properties = [each.user_properties for each in reports if getattr(each, "when", "") == "teardown"]
    if lines := [words for some in properties for name, words in some if name == LINE]:
        terminalreporter.section("genctl")
        for line in lines:
            terminalreporter.line(line)
