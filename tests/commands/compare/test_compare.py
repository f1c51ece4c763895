"""`genctl compare` on a terminal and in a pipe: equal to single runs, with one prefill, in every format."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from genctl.decode.runtime import Pass
from genctl.native.runtime import NativeRuntime
from genctl.terminal.interrupt import Interrupt
from genctl.transformers.runtime import TransformersRuntime
from tests.cli.tool import genctl
from tests.pages.pages import Parts

FIVE: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"do_sample": True, "top_p": 0.9, "top_k": 0, "num_return_sequences": 2},
    "beam": {"num_beams": 3, "num_return_sequences": 2},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4},
    "penalised": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
}
TOLD = ("id", "sequence", "prompt", "text", "token_ids", "finish_reason", "strategy", "seed", "model", "usage")


def inline(name: str, knobs: dict[str, Any]) -> str:
    return f"{name}:" + ",".join(f"{key}={json.dumps(value)}" for key, value in knobs.items())


def strategies(runs: dict[str, dict[str, Any]]) -> list[str]:
    return [word for name, knobs in runs.items() for word in ("--strategy", inline(name, knobs))]


def sets(knobs: dict[str, Any]) -> list[str]:
    return [word for key, value in knobs.items() for word in ("--set", f"{key}={json.dumps(value)}")]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The numbers of forward passes and of prefills."""
    counted = {"forwards": 0, "prefills": 0}
    for kind in (TransformersRuntime, NativeRuntime):
        for method, name in (("__call__", "forwards"), ("prefill", "prefills")):
            monkeypatch.setattr(kind, method, _counting(getattr(kind, method), counted, name))
    return counted


def _counting(method: Any, counted: dict[str, int], name: str) -> Any:
    def call(self: Any, *args: Any, **given: Any) -> Any:
        counted[name] += 1
        return method(self, *args, **given)

    return call


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_five_strategies_equal_five_solo_runs_with_one_prefill(
    name: str, passes: dict[str, int], request: pytest.FixtureRequest
) -> None:
    model = ("-m", str(request.getfixturevalue(name)), "-n", "16", "--seed", "11", "--format", "jsonl")
    runs = {key: knobs for key, knobs in FIVE.items() if not (name == "t5" and key == "contrastive")}
    together = genctl("compare", *model, "hello there", *strategies(runs), "-v")
    assert together.status == 0, together.err
    made = passes["forwards"]
    assert passes["prefills"] == 1
    for run, knobs in runs.items():
        alone = genctl("run", *model, "hello there", *sets(knobs))
        found = [record for record in together.records if record["run"] == run]
        assert len(found) == len(alone.records)
        for one, other in zip(found, alone.records, strict=True):
            assert {key: one[key] for key in TOLD} == {key: other[key] for key in TOLD}
            assert one["logprob"] == pytest.approx(other["logprob"], abs=1e-4)
            assert one["score"] == pytest.approx(other["score"], abs=1e-4)
    # the summary's savings equal the counts
    alone_forwards = passes["forwards"] - made
    assert f"{made} forward passes instead of {alone_forwards}" in together.err
    assert f"1 prefill instead of {len(runs)}" in together.err
    assert made < alone_forwards / 2


def test_the_passes_of_a_negative_prompt_are_counted_on_both_sides(gpt2: Path, passes: dict[str, int]) -> None:
    model = ("-m", str(gpt2), "-n", "6", "--format", "jsonl")
    runs = {"guided": {"guidance_scale": 1.5}, "plain": {}}
    together = genctl("compare", *model, "hello there", *strategies(runs), "-v")
    made = passes["forwards"]
    for knobs in runs.values():
        assert genctl("run", *model, "hello there", *sets(knobs)).status == 0
    assert f"{made} forward passes instead of {passes['forwards'] - made}" in together.err


def test_records_are_those_of_run_with_run_and_metrics_at_the_end(gpt2: Path) -> None:
    model = ("-m", str(gpt2), "-n", "8", "--seed", "3", "--format", "jsonl")
    done = genctl("compare", *model, "hello", "-p", "greedy", "-p", "nucleus")
    solo = genctl("run", *model, "hello", "-p", "greedy").records[0]
    assert [list(record) for record in done.records] == [[*solo, "run", "metrics"]] * 2
    metrics = done.records[0]["metrics"]
    assert list(metrics) == [
        "tokens", "mean_logprob", "perplexity", "score", "entropy", "distinct_1", "distinct_2", "longest_repeat",
        "self_bleu",
    ]  # fmt: skip
    assert metrics["mean_logprob"] == pytest.approx(solo["logprob"] / 8, abs=1e-5)
    assert metrics["entropy"] > 0
    leaves = done.records[1]["metrics"]["divergence"]
    one, other = (record["token_ids"] for record in done.records)
    at = leaves["position"]
    assert one[:at] == other[:at]
    assert (leaves["token"][0], leaves["other"][0]) == (other[at], one[at])


def test_both_probabilities_at_a_divergence_are_the_models_own(gpt2: Path) -> None:
    model = ("-m", str(gpt2), "-n", "8", "--seed", "3", "--format", "jsonl")
    done = genctl("compare", *model, "hello", "-p", "greedy", "-p", "nucleus")
    leaves = done.records[1]["metrics"]["divergence"]
    solo = genctl("run", *model, "hello", "-p", "greedy", "--top-logprobs", "300").records[0]
    known = {id: logprob for id, _, logprob in solo["tokens"][leaves["position"]]["top"]}
    for id, _, logprob in (leaves["token"], leaves["other"]):
        assert logprob == pytest.approx(known[id], abs=1e-4)


def test_the_baseline_is_what_others_are_measured_by(gpt2: Path) -> None:
    arguments = ("compare", "-m", str(gpt2), "-n", "8", "--seed", "3", "hello", "-p", "greedy", "-p", "nucleus")
    done = genctl(*arguments, "--format", "jsonl", "--baseline", "nucleus")
    greedy, nucleus = done.records
    assert "difference" not in nucleus["metrics"]
    assert "divergence" not in nucleus["metrics"]
    assert greedy["metrics"]["divergence"]["run"] == "nucleus"
    difference = greedy["metrics"]["difference"]
    assert difference["to"] == "nucleus"
    for key in ("mean_logprob", "entropy", "tokens"):
        assert difference[key] == pytest.approx(greedy["metrics"][key] - nucleus["metrics"][key])
    text = genctl(*arguments, "--baseline", "nucleus").out
    assert "minus nucleus" in text
    assert "greedy leaves nucleus at token" in text


def test_seeds_repeat_each_run_and_any_text_can_be_repeated_alone(gpt2: Path) -> None:
    model = ("-m", str(gpt2), "-n", "8", "--format", "jsonl")
    done = genctl("compare", *model, "hello", "again", "-p", "greedy", "-p", "nucleus", "--seed", "5", "--seeds", "3")
    assert len(done.records) == 2 * 2 * 3
    drawn = [record for record in done.records if record["run"] == "nucleus"]
    assert len({record["seed"] for record in drawn}) == 6
    assert drawn[0]["seed"] == 5
    for record in drawn:
        seed = ("--seed", str(record["seed"]))
        alone = genctl("run", *model, "-p", "nucleus", *seed, record["prompt"]).records[0]
        assert alone["token_ids"] == record["token_ids"]
    greedy = [record["seed"] for record in done.records if record["run"] == "greedy"]
    assert greedy == [None] * 6  # it draws nothing
    assert all(record["metrics"]["self_bleu"] is not None for record in drawn)


def test_several_checkpoints_continue_the_same_prompts() -> None:
    models = ("--models", "builtin:stories,builtin:numbers")
    done = genctl("compare", "12", "30", *models, "-n", "6", "--format", "jsonl")
    assert done.status == 0, done.err
    assert [(record["id"], record["run"]) for record in done.records] == [
        ("0", "builtin:stories"), ("0", "builtin:numbers"), ("1", "builtin:stories"), ("1", "builtin:numbers"),
    ]  # fmt: skip
    assert done.records[1]["text"] == "twelve"
    assert done.records[3]["text"] == "thirty"
    assert done.records[0]["text"] == genctl("run", "12", "-m", "builtin:stories", "-n", "6").out.removesuffix("\n")
    assert "(each by its own model)" in genctl("compare", "12", *models, "-n", "6").out


def test_a_run_may_bring_a_checkpoint_of_its_own() -> None:
    runs = ("--strategy", "words:model=builtin:numbers", "--strategy", "tale:max_new_tokens=4")
    done = genctl("compare", "7", *runs, "--format", "jsonl")
    assert [record["model"] for record in done.records] == ["builtin:numbers", "builtin:stories"]
    assert done.records[0]["text"] == "seven"


def test_many_prompts_give_means_intervals_and_a_win_table(gpt2: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"line {number}\n" for number in range(10)))
    arguments = ("compare", "-m", str(gpt2), "-i", str(path), "-p", "greedy", "-p", "nucleus", "-n", "6", "--seed", "1")
    done = genctl(*arguments, "--baseline", "greedy")
    assert done.status == 0, done.err
    lines = done.out.splitlines()
    assert "over 10 prompts (95% intervals from 10 prompts on)" in lines[0]
    assert lines[1] == "all runs: tokens 6 [6, 6] · ended by 10 length"
    assert [line.split()[0] for line in lines[2:5]] == ["run", "greedy", "nucleus"]
    records = [record for record in genctl(*arguments, "--format", "jsonl").records]
    for run, line in zip(("greedy", "nucleus"), lines[3:5], strict=True):
        values = [record["metrics"]["mean_logprob"] for record in records if record["run"] == run]
        mean, low, high = map(float, re.findall(r"(-?\d+\.\d{3}) \[(-?\d+\.\d+), (-?\d+\.\d+)\]", line)[0])
        assert mean == pytest.approx(sum(values) / 10, abs=6e-4)
        assert low <= mean <= high
    ahead = sum(
        one["metrics"]["mean_logprob"] > other["metrics"]["mean_logprob"] + 1e-5
        for one, other in zip(records[::2], records[1::2], strict=True)
    )
    row = next(line for line in lines[lines.index(next(x for x in lines if "won/tied/lost" in x)) :] if "/" in line[8:])
    assert "won/tied/lost" in row
    table = lines[lines.index(row) + 2]
    assert table.split()[:2] == ["greedy", "·"]
    assert table.split()[2].split("/")[0] == str(ahead)
    path.write_text("".join(f"line {number}\n" for number in range(9)))
    few = genctl(*arguments, "--baseline", "greedy")
    assert "over 9 prompts (95% intervals from 10 prompts on)" in few.out
    assert not re.search(r"\d \[", few.out)


def test_one_prefill_for_each_prompt_of_many_whatever_is_decoded_at_once(gpt2: Path, passes: dict[str, int]) -> None:
    stdin = "".join(f"line {number} of several\n" for number in range(5))
    arguments = ("compare", "-m", str(gpt2), *strategies(FIVE), "-n", "6", "--seed", "1", "--format", "jsonl")
    outputs = []
    for size in ("1", "2", "5"):
        passes["prefills"] = 0
        done = genctl(*arguments, "--batch-size", size, stdin=stdin)
        assert passes["prefills"] == 5
        outputs.append([(record["run"], record["id"], record["token_ids"]) for record in done.records])
    assert outputs[0] == outputs[1] == outputs[2]
    assert len(outputs[0]) == 5 * 7


def test_rows_have_their_own_params_and_their_own_errors(gpt2: Path) -> None:
    rows = [
        {"id": "a", "prompt": "hello", "params": {"max_new_tokens": 2}},
        {"id": "b", "prompt": "hello", "params": {"num_beens": 2}},
        {"id": "c/d", "prompt": "hello", "params": {"seed": 4}},
    ]
    stdin = "\n".join(map(json.dumps, rows)) + "\nnot json\n"
    flags = ("-p", "greedy", "-p", "nucleus", "-n", "3", "--input-format", "jsonl", "--format", "jsonl")
    done = genctl("compare", "-m", str(gpt2), *flags, stdin=stdin)
    assert done.status == 1
    assert [(record["id"], record.get("run")) for record in done.records] == [
        ("a", "greedy"), ("a", "nucleus"), ("b", "greedy"), ("b", "nucleus"), ("c/d", "greedy"), ("c/d", "nucleus"),
        ("3", None),
    ]  # fmt: skip
    assert [record["usage"]["new_tokens"] for record in done.records[:2]] == [2, 2]
    assert "did you mean num_beams" in done.records[2]["error"]["message"]
    assert [record["seed"] for record in done.records[4:6]] == [None, 4]


def test_one_run_that_fails_lets_the_others_go_on(gpt2: Path) -> None:
    rows = json.dumps({"prompt": "word " * 10}) + "\n" + json.dumps({"prompt": "hi"}) + "\n"
    runs = ("--strategy", "short:max_length=20", "--strategy", "long:max_new_tokens=3")
    done = genctl("compare", "-m", str(gpt2), *runs, "--input-format", "jsonl", "--format", "jsonl", stdin=rows)
    assert done.status == 1
    assert [("error" in record, record["run"]) for record in done.records] == [
        (True, "short"), (False, "long"), (False, "short"), (False, "long"),
    ]  # fmt: skip
    text = genctl("compare", "-m", str(gpt2), *runs, "--input-format", "jsonl", "-v", stdin=rows)
    assert "run short" in text.err
    assert "failed" in text.out


@pytest.mark.parametrize("way", ["rows", "file"])
def test_references_are_scored(way: str, tmp_path: Path) -> None:
    rows = [{"prompt": "12", "reference": ["twelve", "a dozen"]}, {"prompt": "31", "reference": "thirty two"}]
    flags = ["compare", "-m", "builtin:numbers", "-p", "greedy", "-p", "nucleus", "--seed", "1"]
    stdin: str | None = None
    if way == "file":
        path = tmp_path / "references.txt"
        path.write_text("twelve\nthirty two\n")
        flags += ["12", "31", "--references", str(path)]
    else:
        stdin = "\n".join(map(json.dumps, rows))
        flags += ["--input-format", "jsonl"]
    done = genctl(*flags, "--format", "jsonl", stdin=stdin)
    assert done.status == 0, done.err
    first, _, second, _ = (record["metrics"] for record in done.records)
    assert (first["exact_match"], first["chrf"], first["ter"]) == (1.0, 100.0, 0.0)
    assert (second["exact_match"], second["ter"]) == (0.0, 50.0)
    text = genctl(*flags, stdin=stdin).out
    assert "chrF" in text
    assert "as one corpus" in text


def test_references_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "references.txt"
    path.write_text("one\n")
    flags = ("compare", "-m", "builtin:numbers", "-p", "greedy", "-p", "nucleus", "--references")
    done = genctl(*flags, str(path), "1", "2")
    assert (done.status, done.out) == (2, "")
    assert "1 reference, one per line, for 2 prompts" in done.err
    assert "no such file" in genctl(*flags, str(tmp_path / "none"), "1").err.lower()
    row = json.dumps({"prompt": "1", "reference": "one"})
    done = genctl(*flags, str(path), "--input-format", "jsonl", stdin=row)
    assert "has a reference" in done.err


def test_tsv_and_json(gpt2: Path) -> None:
    arguments = (
        "compare",
        "-m",
        str(gpt2),
        "hello",
        "a|b\tc",
        "-p",
        "greedy",
        "-p",
        "nucleus",
        "-n",
        "6",
        "--seed",
        "1",
    )
    header, *lines = genctl(*arguments, "--format", "tsv").out.splitlines()
    columns = header.split("\t")
    table = [dict(zip(columns, line.split("\t"), strict=True)) for line in lines]
    assert [row["run"] for row in table] == ["greedy", "nucleus"] * 2
    records = json.loads(genctl(*arguments, "--format", "json").out)
    assert [row["prompt"] for row in table] == ["hello", "hello", "a|b\\tc", "a|b\\tc"]
    for row, record in zip(table, records, strict=True):
        assert float(row["mean_logprob"]) == record["metrics"]["mean_logprob"]


def test_equal_input_and_seed_give_equal_bytes(gpt2: Path) -> None:
    arguments = ("compare", "-m", str(gpt2), "hello", "-p", "greedy", "-p", "nucleus", "-n", "6", "--seed", "1")
    for format in ("jsonl", "json", "tsv"):
        assert genctl(*arguments, "--format", format).raw == genctl(*arguments, "--format", format).raw
    timed = genctl(*arguments, "--format", "jsonl", "--timing").records[0]
    assert set(timed["timing"]) == {"load_s", "prefill_s", "decode_s"}
    assert timed["metrics"]["tokens_per_s"] > 0


def test_events_name_the_run_and_the_row(gpt2: Path, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    arguments = ("compare", "-m", str(gpt2), "hello", "-p", "greedy", "-p", "nucleus", "-n", "6", "--seed", "1")
    assert genctl(*arguments, "--events", str(path)).status == 0
    lanes = {json.loads(line)["lane"] for line in path.read_text().splitlines()}
    assert lanes == {"greedy/0/1", "nucleus/0/1"}


def test_runs_have_the_order_of_the_command_line_everywhere(gpt2: Path, tmp_path: Path) -> None:
    """Contrastive search and the second checkpoint are decoded out of order."""
    log, page, later = (tmp_path / name for name in ("events.jsonl", "page.html", "later.html"))
    given = ("--models", f"builtin:stories,{gpt2}", "-p", "greedy", "-p", "contrastive", "--strategy", "b:num_beams=2")
    arguments = ("compare", "hello", "world", *given, "-n", "3")
    kept = genctl(*arguments, "--format", "jsonl", "--events", str(log), "--report", str(page))
    assert genctl("report", str(log), "-o", str(later)).status == 0
    runs = [f"{name}@{model}" for name in ("greedy", "contrastive", "b") for model in ("builtin:stories", gpt2)]
    assert [row["run"] for row in kept.records] == 2 * runs
    table = genctl(*arguments, "--format", "tsv").out.splitlines()[1:]
    assert [line.split("\t")[0] for line in table] == 2 * runs
    text = genctl(*arguments).out
    headings = re.findall(r"^── (\w+@\S+) ·", text, re.MULTILINE)[: len(runs)]
    assert [heading[:20] for heading in headings] == [run[:20] for run in runs], "cut to the width"
    for path in (page, later):
        data = Parts(path.read_text("utf-8")).data
        assert data["comparison"]["runs"] == runs
        assert [lane["run"] for lane in data["lanes"]] == 2 * runs
        assert list(data["comparison"]["prompts"][0]["lanes"]) == runs


def test_dry_prints_every_run_and_decodes_nothing(gpt2: Path) -> None:
    done = genctl("compare", "-m", str(gpt2), "-p", "greedy", "--strategy", "b:num_beams=4", "-n", "6", "--dry")
    assert done.status == 0
    assert "# run greedy" in done.out
    assert re.search(r"num_beams = 4 +# --strategy b", done.out)


def test_an_interrupted_comparison_keeps_what_it_has(gpt2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    def interrupt(self: Interrupt) -> str:
        nonlocal asked
        asked += 1
        if asked == 6:
            self.status = 130
        return "interrupted" if self.status else ""

    monkeypatch.setattr(Interrupt, "__call__", interrupt)
    arguments = ("compare", "-m", str(gpt2), *PAIR, "-n", "20", "--batch-size", "1", "--format", "jsonl")
    done = genctl(*arguments, "hello", "never begun")
    assert done.status == 130
    assert [(record["id"], record["finish_reason"]) for record in done.records] == [("0", "interrupted")] * 2
    # one token for each call of `interrupted`
    assert [record["usage"]["new_tokens"] for record in done.records] == [6, 6]


PAIR = ("-p", "greedy", "-p", "nucleus")


@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [
        (("x", "-p", "greedy"), 2, "at least two runs, but there is only greedy"),
        (("x",), 2, "at least two runs, but there is none"),
        (("x", "-p", "greedy", "-p", "greedy"), 2, "two runs are called greedy"),
        (("x", "-p", "greedy", "-p", "gredy"), 2, "did you mean greedy?"),
        (("x", *PAIR, "--baseline", "beam"), 2, "there are: greedy, nucleus"),
        (("x", *PAIR, "--seeds", "0"), 2, "at least 1"),
        (("x", *PAIR, "--force"), 2, "neither"),
        (("x", *PAIR, "--strategy", "golden.jsonl"), 2, "parity MODEL --expect FILE compares with one"),
        (("x", *PAIR, "--timing"), 2, "--timing"),
        (("x", *PAIR, "--strategy", "a:num_beams=0", "--strategy", "b:top_q=1"), 2, "run b: --strategy b: unknown"),
        (("x", "-p", "greedy", "--strategy", "hot:temperature=2,do_sample=false"), 2, "run hot"),
        (("x", *PAIR, "--models", "builtin:stories,builtin:novels"), 3, "numbers, stories"),
        (("x", *PAIR, "--save", "f"), 2, "use genctl parity MODEL --save FILE"),
        (("--expect", "f"), 2, "use genctl parity MODEL --expect FILE"),
        (("x", *PAIR, "--tolerance", "0.1"), 2, "use genctl parity MODEL --expect FILE --max-kl X"),
        (("x", *PAIR, "--regex", "("), 2, "run greedy"),
        (PAIR, 2, "No prompt"),
        (("x", *PAIR, "-i", "missing.txt"), 2, "--input"),
    ],
)
def test_mistakes_get_one_clear_line_and_the_right_status(
    arguments: tuple[str, ...], status: int, sentence: str
) -> None:
    done = genctl("compare", *arguments)
    assert done.status == status, done.err
    assert sentence.lower() in done.err.lower()
    assert "Traceback" not in done.err
    assert done.out == ""


def test_a_checkpoint_that_cannot_do_a_run_names_it(t5: Path) -> None:
    done = genctl("compare", "-m", str(t5), "hello", "-p", "greedy", "--strategy", "healed:token_healing=true")
    assert done.status == 3
    assert "run healed: token_healing" in done.err


def test_every_run_that_a_checkpoint_cannot_do_is_named_at_once() -> None:
    runs = strategies({"a": {"assistant_early_exit": 50}, "b": {}, "c": {"assistant_early_exit": 60}})
    done = genctl("compare", "hello", *runs)
    assert (done.status, done.out) == (3, "")
    lines = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert [line.split(" = ")[0] for line in lines] == [f"error: run {name}: assistant_early_exit" for name in "ac"]


def test_a_prompt_that_is_cut_is_said_once_for_runs_that_read_it_alike(gpt2: Path) -> None:
    runs = strategies({
        "greedy": {"max_new_tokens": 6},
        "drawn": {"max_new_tokens": 6, "do_sample": True},
        "short": {"max_new_tokens": 4},
    })  # fmt: skip
    done = genctl("compare", "-m", str(gpt2), "z" * 300, *runs, "--truncate", "left", "--format", "jsonl")
    assert done.status == 0
    notes = [line for line in done.err.splitlines() if "were taken" in line]
    assert len(notes) == 2
    assert notes[0] == "note: 50 tokens were taken from the prompt (--truncate left)"
    taken = {record["run"]: record["truncated"] for record in done.records}
    assert taken == {"greedy": 50, "drawn": 50, "short": 48}


def test_a_shortage_of_memory_is_said_and_changes_nothing_else(gpt2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = (
        "compare",
        "-m",
        str(gpt2),
        "hello",
        *PAIR,
        "--seeds",
        "3",
        "--seed",
        "2",
        "-n",
        "6",
        "--format",
        "jsonl",
    )
    wanted = genctl(*arguments)
    call = NativeRuntime.__call__

    def small(self: NativeRuntime, given: Pass) -> Any:
        if len(given.feed) > 4:
            raise MemoryError
        return call(self, given)

    monkeypatch.setattr(NativeRuntime, "__call__", small)
    done = genctl(*arguments)
    assert done.status == 0
    assert "note: not enough memory for 6 lanes at once, continuing with 3\n" in done.err
    assert [record["token_ids"] for record in done.records] == [record["token_ids"] for record in wanted.records]


def test_a_persons_terminal_shows_no_control_characters(gpt2: Path) -> None:
    done = genctl("compare", "-m", str(gpt2), "a\x1b[31mb", *PAIR, "-n", "3")
    assert "\x1b" not in done.out


def test_one_preset_with_several_seeds_is_a_comparison(gpt2: Path) -> None:
    arguments = ("compare", "-m", str(gpt2), "-p", "nucleus", "-n", "6", "--seed", "5")
    done = genctl(*arguments, "--seeds", "3", "--format", "jsonl", "the cat")
    assert done.status == 0, done.err
    assert [record["run"] for record in done.records] == ["nucleus"] * 3
    assert len({record["seed"] for record in done.records}) == 3
    for record in done.records:
        alone = genctl(*("run", *arguments[1:-1]), str(record["seed"]), "--format", "jsonl", "the cat").records[0]
        assert alone["token_ids"] == record["token_ids"]
    text = genctl(*arguments, "--seeds", "3", "--baseline", "nucleus", "the cat", "the dog", "-v")
    assert text.status == 0, text.err
    for record in done.records:
        assert f"seed {record['seed']}" in text.out
    assert "less nucleus" not in text.out  # there is nothing to compare it with
    assert "won/tied/lost" not in text.out


@pytest.mark.parametrize("seeds", [(), ("--seeds", "1")])
def test_one_run_alone_is_no_comparison(gpt2: Path, seeds: tuple[str, ...]) -> None:
    done = genctl("compare", "-m", str(gpt2), "-p", "nucleus", *seeds, "the cat")
    assert (done.status, done.out) == (2, "")
    assert "at least two runs, but there is only nucleus" in done.err
    assert "--seeds" in done.err


def test_scores_of_different_length_penalties_are_not_passed_off_as_comparable() -> None:
    runs = ("--strategy", "a:num_beams=2", "--strategy", "b:num_beams=2,length_penalty=2.0", "-n", "3")
    done = genctl("compare", "One day", "-p", "greedy", *runs)
    assert done.status == 0, done.err
    assert "scores of different length_penalty do not compare: it is 1.0 in greedy, a; 2.0 in b" in done.out
    assert "do not compare" not in genctl("compare", "One day", "-p", "greedy", *runs[:2], "-n", "3").out


def test_presets_and_strategies_are_run_as_they_follow_each_other(tmp_path: Path) -> None:
    page, runs = (
        tmp_path / "page.html",
        ["--strategy", "b2:num_beams=2", "-p", "greedy", "--strategy", "b3:num_beams=3"],
    )
    done = genctl("compare", "One day", *runs, "-n", "3", "--format", "jsonl", "--report", str(page))
    assert [json.loads(line)["run"] for line in done.out.splitlines()] == ["b2", "greedy", "b3"]
    assert '"runs":["b2","greedy","b3"]' in page.read_text()


def test_a_difference_is_minus_the_baseline_and_runs_keep_their_order() -> None:
    runs = [word for name in ("nucleus", "greedy", "beam5") for word in ("-p", name)]
    done = genctl("compare", "One day", *runs, "--baseline", "greedy", "-n", "3", "--seed", "1")
    lines = done.out.splitlines()
    table = next(place for place, line in enumerate(lines) if line.startswith("run "))
    assert [line.split()[0] for line in lines[table + 1 : table + 4]] == ["nucleus", "greedy", "beam5"]
    minus = lines.index("minus greedy")
    assert lines[minus + 1].startswith("all runs: tokens 0 · ")  # a whole number, without a sign
    assert [line.split()[0] for line in lines[minus + 2 : minus + 5]] == ["run", "nucleus", "beam5"]


def test_what_is_the_same_for_all_runs_is_said_once_above_the_table() -> None:
    words = ("compare", "-m", "builtin:stories", "-n", "4", "Once")
    done = genctl(*words, "--strategy", "greedy", "--strategy", "b:length_penalty=0.0,num_beams=2")
    above, heads, *rows = done.out.split("\n\n")[1].splitlines()
    assert re.sub(r"-?\d\.\d+", "N", above) == (
        "all runs: tokens 4 · logprob/token N · perplexity N · entropy N · distinct-1 N · distinct-2 N · repeat 0 · "
        "ended by length"
    )
    assert heads.split() == ["run", "score", "tok/s"]  # speeds are measured, so they are equal only by chance
    assert [row.split()[0] for row in rows] == ["greedy", "b"]
