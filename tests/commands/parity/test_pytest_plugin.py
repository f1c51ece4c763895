"""The pytest plugin: gates of golden files, and `--genctl-update`."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.warm import python

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.usefixtures("clean_environment")

PLUGIN = "genctl.commands.parity.pytest_plugin"
# plugins that no test here needs; importing them takes longer than most of these tests
WITHOUT = ("-p", "no:hypothesispytest", "-p", "no:anyio")
GOLDEN = """
def test_golden(genctl_golden):
    assert genctl_golden("stories", "{side}", ["Once upon a time"], max_new_tokens=6)
"""


def run(pytester: pytest.Pytester, *words: str) -> pytest.RunResult:
    loaded = [] if any(one.value == PLUGIN for one in entry_points()) else ["-p", PLUGIN]
    return pytester.run(*python(), "-m", "pytest", *loaded, *WITHOUT, "-p", "no:cacheprovider", *words)


def entry_points() -> list[importlib.metadata.EntryPoint]:
    return [*importlib.metadata.entry_points(group="pytest11")]


def test_a_missing_golden_file_fails_until_it_is_recorded(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(GOLDEN.format(side="builtin:stories"))
    missing = run(pytester)
    missing.assert_outcomes(failed=1)
    missing.stdout.fnmatch_lines(
        ["golden stories: there is no *stories.jsonl", "hint: pytest --genctl-update records it"]
    )
    missing.stdout.no_fnmatch_line("*Traceback*")
    recorded = run(pytester, "--genctl-update")
    recorded.assert_outcomes(passed=1)
    recorded.stdout.fnmatch_lines(["*= genctl =*", "golden stories: recorded, * bytes"])
    golden = pytester.path / "goldens" / "stories.jsonl"
    assert json.loads(golden.read_text().splitlines()[0])["reference"] == "builtin:stories"
    again = run(pytester)
    again.assert_outcomes(passed=1)
    again.stdout.no_fnmatch_line("*= genctl =*")


def test_a_defect_fails_and_the_file_stays(pytester: pytest.Pytester, llama: Path, tmp_path: Path) -> None:
    from tests.commands.parity.test_golden import changed

    test = (
        'def test_golden(genctl_golden):\n    assert genctl_golden("tiny", "{}", ["the cat sat"], max_new_tokens=6)\n'
    )
    pytester.makepyfile(test.format(llama))
    run(pytester, "--genctl-update").assert_outcomes(passed=1)
    golden = pytester.path / "goldens" / "tiny.jsonl"
    content = golden.read_bytes()
    other = changed(llama, tmp_path / "other", lambda weights: weights["model.norm.weight"].mul_(1.01))
    pytester.makepyfile(test.format(other))
    failed = run(pytester)
    failed.assert_outcomes(failed=1)
    failed.stdout.fnmatch_lines(["golden tiny: defect: *× rounding error*"])
    text = failed.stdout.str()
    assert f"; the recording was made with {llama} (" in text
    assert f"; {other} against tiny.jsonl, which has {llama}" in text
    run(pytester, "--genctl-update").assert_outcomes(failed=1)
    assert golden.read_bytes() == content


def test_a_figure_that_fails_is_shown_in_short_lines(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        def test_pair(genctl_parity):
            found = genctl_parity("builtin:stories", "builtin:stories@cache=static", ["The dog"], max_new_tokens=4)
            assert (found.verdict, found.summary.kl.max, found.summary.positions) == ("tie", 0.0, 4)
            found = genctl_parity("builtin:stories", "builtin:stories@quantize=int8", ["The dog"], max_new_tokens=4)
            assert found.summary.kl.mean < 1e-9
        """
    )
    failed = run(pytester, "-vv")
    failed.assert_outcomes(failed=1)
    failed.stdout.fnmatch_lines(
        [
            "*where * = Quantiles(mean=*, median=*, p99=*, max=*).mean",
            "*where * = Summary(4 positions, kl=Quantiles(*), agreement=*).kl",
            "*where Summary(*) = <builtin:stories@quantize=int8 against builtin:stories: *>.summary",
        ]
    )
    assert max(map(len, failed.stdout.lines)) < 250


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ('genctl_golden("../x", "builtin:stories", ["a"])', "golden '../x': a name has letters*"),
        (
            'genctl_parity("builtin:stories", "builtin:stories@dtyp=float32", ["a"])',
            "*unknown setting dtyp; did you mean*",
        ),
        ('genctl_parity("builtin:stories", "builtin:stories", [])', "there is no prompt to compare the sides on"),
    ],
)
def test_mistakes_are_one_line_and_no_traceback(pytester: pytest.Pytester, call: str, message: str) -> None:
    pytester.makepyfile(f"def test_it(genctl_golden, genctl_parity):\n    {call}\n")
    result = run(pytester)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([message])
    result.stdout.no_fnmatch_line("*Traceback*")
    result.stdout.no_fnmatch_line("*another exception*")


def test_other_prompts_than_recorded_are_said(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(GOLDEN.format(side="builtin:stories"))
    run(pytester, "--genctl-update").assert_outcomes(passed=1)
    pytester.makepyfile(GOLDEN.format(side="builtin:stories").replace("time", "day"))
    result = run(pytester, "--genctl-update")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["golden stories: * is that of another test: its prompts or its max_new_tokens differ"])


def test_the_plugin_costs_other_tests_nothing() -> None:
    code = (
        f"import sys, {PLUGIN};"
        "heavy = {'torch', 'transformers', 'numpy', 'rich', 'typer', 'pydantic', 'tomli'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_package_names_the_plugin() -> None:
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'[project.entry-points.pytest11]\ngenctl = "{PLUGIN}"\n' in text
