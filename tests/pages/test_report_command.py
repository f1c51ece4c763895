"""`--report` and `genctl report`: pages of real runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from genctl.pages.search_tree import SCALE
from tests.cli.tool import genctl
from tests.pages.pages import Parts

NUMBERS = ("-m", "builtin:numbers", "--color", "never")


def facts_of(parts: Parts) -> str:
    return " ".join("".join(parts.texts).split())


def test_a_run_is_written_as_before_and_its_page_beside_it(tmp_path: Path) -> None:
    page = tmp_path / "run.html"
    plain = genctl("run", *NUMBERS, "twelve", "--do-sample", "--seed", "3")
    done = genctl("run", *NUMBERS, "twelve", "--do-sample", "--seed", "3", "--report", str(page))
    assert (done.status, done.out) == (0, plain.out)
    parts = Parts(page.read_text())
    (lane,) = parts.data["lanes"]
    assert lane["sequences"][0]["text"] == plain.out.removesuffix("\n")
    assert lane["tree"]["top"]  # alternatives, though nothing asked for them
    said = facts_of(parts)
    for fact in ("builtin:numbers", "sha256:", "native", "cpu", "tokens/s", "do_sample = true", "--seed 3"):
        assert fact in said


def test_the_command_to_repeat_it_has_the_seed_that_was_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "run.html"
    words = ["run", *NUMBERS, "twelve", "--do-sample", "--report", str(page)]
    monkeypatch.setattr("sys.argv", ["genctl", *words])
    assert genctl(*words).status == 0
    parts = Parts(page.read_text())
    assert f"--do-sample --seed {parts.data['lanes'][0]['seed']}" in facts_of(parts)
    assert str(page) not in facts_of(parts)  # nothing that the run wrote is in its way


@pytest.mark.parametrize("format", ["jsonl", "tsv", "json"])
def test_records_are_the_same_with_and_without_a_page(tmp_path: Path, format: str) -> None:
    words = ["run", *NUMBERS, "twelve", "nine", "--seed", "1", "--format", format]
    words += ["--explain", "--repetition-penalty", "1.2"] if format == "jsonl" else []
    plain = genctl(*words)
    assert genctl(*words, "--report", str(tmp_path / "p.html")).out == plain.out


def test_rows_that_fail_are_on_the_page(tmp_path: Path) -> None:
    rows = '{"id": "a", "prompt": "twelve"}\n{"id": "b", "prompt": "nine", "params": {"top_p": 7}}\n{"id": "c"\n'
    page = tmp_path / "p.html"
    done = genctl("run", *NUMBERS, "--input-format", "jsonl", "--format", "jsonl", "--report", str(page), stdin=rows)
    assert done.status == 1
    lanes = {lane["lane"]: lane for lane in Parts(page.read_text()).data["lanes"]}
    assert sum("error" in lane for lane in lanes.values()) == 2
    assert "top_p" in lanes["b"]["error"]["message"]
    assert lanes["a"]["sequences"]


def test_a_search_has_its_tree(tmp_path: Path) -> None:
    page = tmp_path / "p.html"
    assert genctl("beam", *NUMBERS, "twelve", "--num-beams", "3", "--report", str(page)).status == 0
    (lane,) = Parts(page.read_text()).data["lanes"]
    assert "d" in lane["tree"]["state"]
    assert lane["strategy"] == "beam"


def test_runs_of_a_comparison_have_columns_and_intervals(tmp_path: Path) -> None:
    page = tmp_path / "p.html"
    words = ["compare", *NUMBERS, "-p", "greedy", "-p", "nucleus", "twelve", "nine", "--seed", "1"]
    words += ["--baseline", "nucleus", "--format", "jsonl"]
    plain = genctl(*words)
    assert genctl(*words, "--report", str(page)).out == plain.out
    shown = Parts(page.read_text()).data["comparison"]
    assert (shown["runs"], shown["base"], len(shown["prompts"])) == (["greedy", "nucleus"], "nucleus", 2)
    assert all(one["runs"]["greedy"][1:] == [None, None, 2] for one in shown["metrics"])
    many = ("".join(letter) for letter in zip("abcdefghij", "bcdefghijk", strict=True))
    assert genctl(*words, "--report", str(page), "--force", *many).status == 0
    shown = Parts(page.read_text()).data["comparison"]
    one = next(one["runs"]["greedy"] for one in shown["metrics"] if one["label"] == "logprob/token")
    assert one[1] <= one[0] <= one[2]
    assert one[3] == 12


def test_scored_texts_have_a_strip_and_figures(tmp_path: Path) -> None:
    page = tmp_path / "p.html"
    text = "Once upon a time there was a fox."
    plain = genctl("score", text, "--format", "jsonl", "--scores")
    done = genctl("score", text, "--format", "jsonl", "--scores", "--report", str(page))
    assert (done.status, done.out) == (0, plain.out)
    parts = Parts(page.read_text())
    (lane,) = parts.data["lanes"]
    record = json.loads(plain.out)
    assert lane["tree"]["logprob"] == [round(one["logprob"] * SCALE) for one in record["scores"]]
    assert lane["tree"]["rank"] == [one["rank"] for one in record["scores"]]
    assert "perplexity" in lane["figures"][""]
    shown = facts_of(parts)
    assert "scored tokens9" in shown
    assert "tokens/s" not in shown
    assert "new tokens" not in shown


def test_a_page_has_the_measured_cache(tmp_path: Path) -> None:
    page = tmp_path / "p.html"
    done = genctl("inspect-cache", "Once upon a time", "--steps", "2", "--format", "json", "--report", str(page))
    cache, report = Parts(page.read_text()).data["cache"], json.loads(done.out)
    assert cache["total_bytes"] == report["total_bytes"]
    assert [one["step"] for one in cache["steps"]] == [0, 1, 2]
    assert [layer["bytes"] for layer in cache["layers"]] == [layer["bytes"] for layer in report["layers"]]


def test_a_recording_makes_the_page_later(tmp_path: Path) -> None:
    events, page = tmp_path / "run.jsonl", tmp_path / "run.html"
    genctl("beam", *NUMBERS, "twelve", "--events", str(events), "--report", str(tmp_path / "live.html"))
    done = genctl("report", str(events))
    assert (done.status, done.out, done.err) == (0, "", f"wrote {page}\n")
    live = Parts((tmp_path / "live.html").read_text()).data
    assert Parts(page.read_text()).data["lanes"] == live["lanes"]
    again = genctl("report", str(events))
    assert again.status == 2
    assert again.err.startswith(f"error: the output exists already: {page}")
    assert genctl("report", str(events), "--force", "-q").err == ""


def test_a_recording_on_standard_input_needs_a_name(tmp_path: Path) -> None:
    done = genctl("report", "-", stdin="")
    assert done.status == 2
    assert "give the page one with --output FILE" in done.err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("run", "x", "--report", "-"), "--report -: a page is a file"),
        (("run", "x", "--report", "p", "--output", "p"), "--output names the same file"),
        (("run", "x", "--report", "p", "--events", "p"), "--report names the same file"),
        (("run", "-i", "x", "-o", "y.jsonl", "--resume", "--report", "p"), "--report shows one run from its beginning"),
        (("inspect-cache", "--plan", "--report", "p"), "--report belongs to a measurement"),
    ],
)
def test_what_contradicts_a_page_is_refused(words: tuple[str, ...], sentence: str) -> None:
    done = genctl(*words)
    assert done.status == 2
    assert sentence in done.err


def test_a_run_that_fails_leaves_no_page(tmp_path: Path) -> None:
    page = tmp_path / "p.html"
    assert genctl("run", "-m", str(tmp_path / "nowhere"), "x", "--report", str(page)).status == 3
    assert not page.exists()


def test_a_page_appears_when_it_is_whole(tmp_path: Path) -> None:
    from genctl.commands.recording import PageFile

    page = tmp_path / "p.html"
    given_up = PageFile(str(page), force=False)
    assert not page.exists()
    given_up.__exit__(KeyboardInterrupt, None, None)
    assert list(tmp_path.iterdir()) == []
    with PageFile(str(page), force=False):
        assert not page.exists()
    assert page.read_text().endswith("</html>")
    assert list(tmp_path.iterdir()) == [page]


def test_an_existing_page_is_kept_without_force(tmp_path: Path) -> None:
    page = tmp_path / "p.html"
    page.write_text("mine")
    assert genctl("run", *NUMBERS, "x", "--report", str(page)).status == 2
    assert page.read_text() == "mine"
    assert genctl("run", *NUMBERS, "x", "--report", str(page), "--force").status == 0
    assert page.read_text().startswith("<!doctype html>")
