"""The model beside a tree: its numbers on every kind of cache, what is read again and what is not."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch

from genctl import events
from genctl.config.layers import Layer
from genctl.engines.protocol import Request
from genctl.engines.session import Session
from genctl.params import Runtime
from genctl.tree.commands import Wrote
from genctl.tree.explorer import Explorer
from genctl.tree.token_tree import ROOT
from tests import tiny
from tests.tree.trees import explorer

PROMPT = (5, 17, 230, 41, 8, 99, 12, 64, 7, 3, 150)
SCRIPT = ["generate 6", "left 3", "take 2 4", "start", "take 3 5", "goto 2", "sample 2 3", "take 2 0"]


@cache
def session(arch: str, runtime: str = "auto") -> Session:
    folder = Path(mkdtemp()) / arch
    tiny.checkpoint(arch, folder)
    return Session.load(Runtime(model=str(folder), runtime=runtime))


def made(arch: str, runtime: str = "auto", memory: int | None = None, **knobs: object) -> Explorer:
    layers = [Layer("flag", knobs, declared="command", typed=True)] if knobs else []
    loaded = session(arch, runtime)
    made = Explorer.begin(loaded, "", PROMPT, layers, seed=7)
    loaded.keep_texts(memory)
    return made


@pytest.mark.parametrize("memory", [None, 1], ids=["kept", "nothing kept"])
@pytest.mark.parametrize("arch", tiny.CAUSAL)
def test_the_scores_after_every_node_are_those_of_its_text_alone(arch: str, memory: int | None) -> None:
    tree = made(arch, memory=memory)
    for line in SCRIPT:
        list(tree.do(line))
    forward = tree.session.forward
    assert len(tree.tree) > 12
    for node in range(len(tree.tree), -1, -1):
        ids = tree.tree.ids(node)
        alone = forward.prefill(ids, None, use_cache=False).logits[0].log_softmax(-1)
        kept = tree.branches.scores(node).log_softmax(-1)
        assert torch.allclose(kept, alone, atol=2e-4), (arch, node)
        if node != ROOT:
            token = tree.tree.nodes[node]
            own = tree.branches.scores(token.parent).log_softmax(-1)
            assert token.logprob == pytest.approx(float(own[token.id]), abs=2e-4)


@pytest.mark.parametrize("arch", ["llama", "mistral", "mamba", "jamba", "bloom"])
@pytest.mark.parametrize("runtime", ["auto", "transformers"])
@pytest.mark.parametrize(
    "knobs", [{}, {"do_sample": True, "temperature": 0.9, "top_p": 0.9}], ids=["greedy", "sampled"]
)
def test_the_tokens_are_those_of_a_run_with_the_same_ids(arch: str, runtime: str, knobs: dict[str, object]) -> None:
    """A branch that the cache holds continues as one that is read at once."""
    tree = made(arch, runtime, **knobs)
    for line in ("generate 5", "left 2", "take 3 0"):
        list(tree.do(line))
    start = tree.tree.cursor
    tree.distribution(start)
    (wrote,) = [result for result in list(tree.do("generate 12")) if isinstance(result, Wrote)]
    engine = tree.session
    resolved = engine.resolve([Layer("flag", {**knobs, "max_new_tokens": 12}, declared="command", typed=True)])
    request = Request("0", resolved, wrote.seed or 0, prompt_ids=tree.tree.ids(start))
    (finished,) = [event for event in engine.stream(iter([request])) if isinstance(event, events.Finished)]
    assert (
        tuple(tree.tree.nodes[node].id for node in tree.tree.path(wrote.node, start)) == finished.hypotheses[0].tokens
    )


def test_going_back_to_a_branch_reads_one_token() -> None:
    made = explorer()
    for line in ("generate 6", "left 2", "take 2 3", "start", "sample 3 4", "left"):
        list(made.do(line))
    branches = made.branches
    ends = [*made.tree.leaves]
    for node in ends:
        list(made.do(f"goto {node}"))
        list(made.do("show 3"))
    branches.forget()
    read = branches.read_tokens
    for node in [*ends, *ends[::-1]]:
        list(made.do(f"goto {node}"))
        list(made.do("show 3"))
        list(made.do("start"))
        list(made.do("right"))
        list(made.do("show 3"))
    assert branches.read_tokens - read <= 2 * len(ends)  # the last token of each, for its scores
    forwards = made.session.forward.forwards
    list(made.do("set temperature=0.5"))
    list(made.do("show"))
    list(made.do("why"))
    assert made.session.forward.forwards == forwards  # other settings need no pass


def test_the_text_that_was_visited_longest_ago_leaves_first() -> None:
    made = explorer(memory=1)
    for line in ("generate 6", "start", "take 2 4"):
        list(made.do(line))
    texts = made.session.texts
    assert texts is not None
    assert texts.bytes <= texts.most
    made.branches.forget()
    read = made.branches.read_tokens
    list(made.do("show"))
    assert made.branches.read_tokens - read == len(made.tree.ids(made.tree.cursor))  # read again


def test_settings_that_keep_no_cache_write_the_same() -> None:
    plain, uncached = explorer(), explorer(use_cache=False)
    for line in ("generate 5", "left", "take 2 3"):
        list(plain.do(line))
        list(uncached.do(line))
    assert [node.id for node in uncached.tree.nodes] == [node.id for node in plain.tree.nodes]
