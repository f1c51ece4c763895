"""`genctl explore` without a screen: --expand, --script, saved trees, and what is refused."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from tests.cli.tool import genctl
from tests.tiny import checkpoint

PROMPT = "Once upon a time"


def test_a_row_for_each_continuation() -> None:
    done = genctl("explore", PROMPT, "--expand", "mass=0.5,depth=4", "--format", "jsonl")
    assert done.status == 0
    rows = done.records
    assert [row["sequence"] for row in rows] == list(range(len(rows)))
    assert rows[0]["text"] == ", there was a"
    assert {len(row["token_ids"]) for row in rows} == {4}
    assert all(row["logprob"] == row["total"] for row in rows)  # no processor acts
    assert [row["total"] for row in rows] == sorted((row["total"] for row in rows), reverse=True)
    assert rows[-1]["mass"] == pytest.approx(sum(math.exp(row["total"]) for row in rows))
    assert rows[-1]["mass"] >= 0.5 > rows[-2]["mass"]
    assert done.err.startswith("note: 10 continuations cover 50.28% of the probability")


def test_each_format_has_the_same_rows() -> None:
    line = ["explore", PROMPT, "--expand", "mass=0.4,depth=3"]
    rows = genctl(*line, "--format", "jsonl").records
    assert json.loads(genctl(*line, "--format", "json").out) == rows
    header, *tsv = [text.split("\t") for text in genctl(*line, "--format", "tsv").out.splitlines()]
    assert header == ["sequence", "logprob", "total", "mass", "ended", "token_ids", "text"]
    assert [row[-1] for row in tsv] == [row["text"] for row in rows]
    assert [json.loads(row[-2]) for row in tsv] == [row["token_ids"] for row in rows]
    text = [line.split("\t") for line in genctl(*line).out.splitlines()]
    assert [row[2] for row in text] == [row["text"] for row in rows]
    assert [float(row[0]) for row in text] == pytest.approx([math.exp(row["total"]) for row in rows], rel=1e-4)


def test_on_a_terminal_it_is_a_table() -> None:
    done = genctl("explore", PROMPT, "--expand", "mass=0.4,depth=3", terminal=True)
    first = done.out.splitlines()[0].split()
    assert all(re.fullmatch(r"[\d.]+%", cell) for cell in first[:2])
    assert '", there was"' in done.out


SCRIPT = """
# every kind
generate 6
left 2
show 3
take 2 3
start
sample 2 3
set top_p=0.5
show 4
why
undo
beams 2 3
goto 3
edit  and
find cat
expand mass=0.3,depth=2
text
undo
undo
undo
undo
undo
undo
undo
"""


def test_a_script_does_what_keys_do(tmp_path: Path) -> None:
    (tmp_path / "s").write_text(SCRIPT)
    text = genctl("explore", PROMPT, "--script", str(tmp_path / "s"), "--seed", "3")
    assert text.status == 0, text.err
    assert 'node 6  ", there was a curious girl"  (length, ' in text.out
    assert "removed by top_p" in text.out
    assert "nothing is left to undo" in text.out
    done = genctl("explore", PROMPT, "--script", "-", "--seed", "3", "--format", "jsonl", stdin=SCRIPT)
    kinds = [record["event"] for record in done.records]
    assert {"tokenwritten", "wrote", "at", "shown", "why", "settings", "continuation", "covered",
            "branchtext"} == set(kinds)  # fmt: skip
    shown = [record for record in done.records if record["event"] == "shown"]
    assert shown[0]["alternatives"][0]["rank"] == 1
    assert [len(record["alternatives"]) for record in shown[:2]] == [3, 4]


def test_a_saved_tree_is_opened_and_made_a_page(tmp_path: Path) -> None:
    tree, page = tmp_path / "tree.jsonl", tmp_path / "tree.html"
    begin = ["explore", PROMPT, "--seed", "3", "--temperature", "0.8", "--save", str(tree), "--script", "-"]
    assert genctl(*begin, stdin="generate 4\nstart\nsample 2 3\n").status == 0
    assert genctl(*begin, stdin="generate 4\n").status == 2  # nothing is overwritten
    content = tree.read_bytes()
    more = genctl("explore", "--open", str(tree), "--script", "-", stdin="generate 3\n")
    assert more.status == 0, more.err
    assert tree.read_bytes().startswith(content)
    whole = tmp_path / "whole"
    begin[begin.index(str(tree))] = str(whole)
    assert genctl(*begin, stdin="generate 4\nstart\nsample 2 3\ngenerate 3\n").status == 0
    assert whole.read_bytes() == tree.read_bytes()
    assert genctl("report", str(tree), "-o", str(page)).status == 0
    assert "curious" in page.read_text() or PROMPT in page.read_text()


def test_save_writes_a_tree_that_had_no_file(tmp_path: Path) -> None:
    path = tmp_path / "tree.jsonl"
    script = f"generate 3\nsave {path}\ngenerate 3\n"
    done = genctl("explore", PROMPT, "--script", "-", stdin=script)
    assert done.status == 0, done.err
    assert f"the tree is saved in {path}" in done.out
    again = genctl("explore", "--open", str(path), "--script", "-", stdin="text\n")
    assert again.out == "Once upon a time, there was a curious girl\n"
    taken = genctl("explore", PROMPT, "--script", "-", stdin=script)
    assert taken.status == 2
    assert f"save {path}: {path} exists already" in taken.err


def test_trust_is_not_given_to_a_checkpoint_that_a_file_names(tmp_path: Path) -> None:
    tree = tmp_path / "t"
    assert genctl("explore", PROMPT, "--save", str(tree), "--script", "-", stdin="generate 1\n").status == 0
    done = genctl("explore", "--open", str(tree), "--script", "-", "--trust-remote-code", stdin="generate 1\n")
    assert done.status == 2
    assert f"--trust-remote-code: --open {tree} names the checkpoint" in done.err


def test_ids_are_enough(tmp_path: Path) -> None:
    row = json.dumps({"prompt_ids": [5, 6, 7]})
    folder = checkpoint("llama", tmp_path / "m")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    common = ["explore", "-m", str(folder), "-i", "-", "--input-format", "jsonl", "--format", "jsonl"]
    done = genctl(*common, "--expand", "mass=0.5,depth=2", stdin=row)
    assert done.status == 0, done.err
    assert {record["text"] for record in done.records} == {""}
    (tmp_path / "s").write_text("generate 2\nedit hello\n")
    refused = genctl(*common, "--script", str(tmp_path / "s"), stdin=row)
    assert refused.status == 3
    assert "has no tokenizer" in refused.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--expand", "mass=2,depth=3"], "--expand mass=2,depth=3: mass is above 0 and at most 1"),
        (["--expand", "mass=0.5"], "there is no depth=N, and a text may have no end"),
        (["--expand", "depth=0"], "depth is a number from 1 on"),
        (["--expand", "depth=3,depth=4"], "is not one of mass=SHARE, depth=N, nodes=N, each once"),
        (["--expand", "deep=3"], "'deep=3' is not one of"),
        (["--expand", "depth=3", "--script", "-"], "--expand and --script exclude each other"),
        (["--expand", "depth=2", "--open", "x"], "leave out the prompt"),
        (["--expand", "depth=2", "--open", "x", "--save", "y"], "--open x continues that file, and --save y"),
        (["--expand", "depth=2", "--save", "-"], "--save -: a tree is a file that is read again"),
        (["--script", "nowhere"], "cannot read --script nowhere: no such file"),
        (["--script", "-", "--format", "tsv"], "--script has none"),
        (
            ["--expand", "depth=2", "--backend", "openai:http://localhost:1"],
            "--backend): a tree needs the distribution over all token ids",
        ),
        (["another", "--expand", "depth=2"], "a tree has one prompt, and there are 2"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_loaded(arguments: list[str], words: str) -> None:
    done = genctl("explore", PROMPT, *arguments, stdin="")
    assert done.status == 2
    assert words in done.err


def test_every_mistake_of_a_script_is_said_with_its_line(tmp_path: Path) -> None:
    script = "generate 5\ngenerat 5\n\ntake\nset topp=0.5\nset top_p=7\nleft x\nedit\n"
    done = genctl("explore", PROMPT, "--script", "-", stdin=script)
    assert done.status == 2
    assert [line.partition(": ")[2] for line in done.err.splitlines()[:6]] == [
        "standard input, line 2: unknown command 'generat'; did you mean generate?",
        "standard input, line 4: take: a rank is a number from 1 on, not ''; expected take RANK|id:N|\"TEXT\" [N]",
        "standard input, line 5: set: unknown setting 'topp'; did you mean top_p?; expected set KNOB=VALUE",
        "standard input, line 6: set: top_p = 7: must be at most 1; expected set KNOB=VALUE",
        "standard input, line 7: left: n is a number from 1 on, not 'x'; expected left [N]",
        "standard input, line 8: edit: there is no text; expected edit TEXT",
    ]


def test_a_command_that_cannot_be_done_is_named() -> None:
    done = genctl("explore", PROMPT, "--script", "-", stdin="generate 2\ngoto 99\ngenerate 2\n")
    assert done.status == 2
    assert "goto 99: there is no node 99: the nodes are 0 to 2" in done.err


def test_an_encoder_decoder_has_no_tree(tmp_path: Path) -> None:
    done = genctl("explore", PROMPT, "--expand", "depth=2", "-m", str(checkpoint("t5", tmp_path / "m")))
    assert done.status == 3
    assert "m is an encoder-decoder, whose text is not one branch" in done.err


@pytest.mark.parametrize("terminal", [False, True])
def test_without_a_terminal_the_command_that_needs_none_is_named(
    terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb" if terminal else "xterm")
    done = genctl("explore", PROMPT, terminal=terminal, stdin=None if terminal else "")
    assert done.status == 2
    assert ("TERM=dumb" if terminal else "standard input is no terminal") in done.err
    assert "--expand mass=0.9,depth=6" in done.err


def test_a_tree_keeps_its_own_settings(tmp_path: Path) -> None:
    tree = tmp_path / "t"
    assert genctl("explore", PROMPT, "--save", str(tree), "--script", "-", stdin="generate 2\n").status == 0
    for flags, key in ((["--top-p", "0.5"], "--top-p"), (["--seed", "5"], "--seed"), (["-n", "3"], "max-new-tokens")):
        done = genctl("explore", "--open", str(tree), "--script", "-", *flags, stdin="generate 2\n")
        assert done.status == 2
        assert key in done.err
        assert "continues a tree, which has its own settings" in done.err
    other = genctl("explore", "--open", str(tree), "--script", "-", "-m", "builtin:numbers", stdin="generate 2\n")
    assert other.status == 2
    assert "was made with builtin:stories" in other.err
