"""`--strategy NAME` makes the mode that it says, or is an error."""

from __future__ import annotations

import pytest

from genctl.config.modes import NAMED
from tests.cli.tool import genctl

MORE = {
    "constrained-beam": ["--set", 'force_words=["bridge"]'],
    "assisted": ["--assistant-model", "builtin:stories"],
    "early-exit": ["--assistant-early-exit", "2"],
    "contrastive-decoding": ["--amateur-model", "builtin:stories"],
}


@pytest.mark.parametrize("name", NAMED)
def test_every_name_runs_as_what_it_is_called(name: str) -> None:
    shape = ["-n", "6", "--seed", "1", "--format", "jsonl", "One day"]
    done = genctl("run", "--strategy", name, *MORE.get(name, []), *shape)
    assert done.status == 0, done.err
    assert done.records[0]["strategy"] == name


def test_flags_refine_a_named_strategy() -> None:
    shape = ["-n", "6", "--format", "jsonl", "One day"]
    two = genctl("run", "--strategy", "beam", "--num-beams", "2", *shape).records[0]
    assert two["token_ids"] == genctl("run", "--num-beams", "2", *shape).records[0]["token_ids"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--strategy", "beem"), "there is no such strategy"),
        (("--strategy", "greedy", "--do-sample"), "make it sample"),
        (("--strategy", "beam", "--num-beams", "1"), "make it greedy"),
        (("--strategy", "assisted"), "it needs assistant_model"),
        (("--strategy", "constrained-beam"), "it needs force_words"),
    ],
)
def test_what_contradicts_a_name_is_refused(arguments: tuple[str, ...], sentence: str) -> None:
    done = genctl("run", *arguments, "-n", "4", "One day")
    assert (done.status, done.out) == (2, "")
    assert sentence in done.err
