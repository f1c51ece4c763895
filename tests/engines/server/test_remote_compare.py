"""`genctl compare` with servers: each run may name its own, beside checkpoints here."""

from __future__ import annotations

from tests.cli.tool import genctl
from tests.engines.server.stand_in import running


def test_each_run_may_name_its_own_server() -> None:
    with running() as one, running(words=(" one", " 2"), models=("other",)) as two:
        runs = ("--strategy", f"a:backend={one.url}", "--strategy", f"b:backend={two.url}")
        done = genctl("compare", *runs, "-n", "4", "--format", "jsonl", "Hi", "You")
        assert done.status == 0, done.err
        assert [(record["run"], record["text"]) for record in done.records] == [
            ("a", " one two three four"),
            ("b", " one 2"),
        ] * 2
        first, second = done.records[:2]
        assert (first["backend"], first["exact"], first["model"]) == (one.url, False, "tiny")
        assert (second["backend"], second["model"]) == (two.url, "other")
        assert second["metrics"]["divergence"]["position"] == 1
        assert (first["metrics"]["tokens"], first["metrics"]["mean_logprob"]) == (4, -0.5)


def test_a_server_is_compared_with_a_checkpoint_here() -> None:
    with running() as server:
        runs = ("--strategy", "here:model=builtin:stories", "--strategy", f"there:backend={server.url}")
        done = genctl("compare", *runs, "-n", "3", "--format", "jsonl", "Hi")
        assert done.status == 0, done.err
        here, there = done.records
        assert here["model"] == "builtin:stories"
        assert "backend" not in here
        assert len(here["token_ids"]) == 3
        assert there["text"] == " one two three"


def test_same_texts_do_not_diverge_and_other_texts_do() -> None:
    """Ids are unknown, and unknown ids must not count as equal."""
    with running() as server:
        runs = ("--strategy", "a:seed=1", "--strategy", "b:seed=1", "--strategy", "c:seed=2")
        done = genctl("compare", *runs, "--backend", server.url, "--do-sample", "--format", "jsonl", "Hi")
        assert done.status == 0, done.err
        assert [record["metrics"].get("divergence") is None for record in done.records] == [True, True, False]


def test_a_server_without_log_probabilities_is_compared_by_its_texts() -> None:
    with running(logprobs=False) as server:
        runs = ("--strategy", "a:seed=1", "--strategy", "b:seed=2", "--backend", server.url, "--do-sample", "Hi")
        shown = genctl("compare", *runs, terminal=True, color="never")
        assert shown.status == 0, shown.err
        assert "b leaves a at token 1: “·three” – instead of “·two” –" in shown.out
        first, second = genctl("compare", *runs, "--format", "jsonl").records
        assert first["metrics"]["mean_logprob"] is first["metrics"]["score"] is None
        assert second["metrics"]["divergence"]["token"] == [None, " three", None]


def test_a_run_that_the_server_cannot_do_is_named() -> None:
    with running() as server:
        runs = ("--strategy", "beams:num_beams=3", "--strategy", "greedy:do_sample=false")
        done = genctl("compare", *runs, "--backend", server.url, "Hi")
        assert done.status == 3
        assert f"error: run beams: {server.url}: num_beams = 3" in done.err
        assert server.rows == []
