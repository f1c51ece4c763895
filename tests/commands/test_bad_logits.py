"""A checkpoint whose logits overflow, and settings that leave no token: every command reports it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from genctl.engines.session import Session
from genctl.errors import ModelError
from genctl.models import resolve
from genctl.params import Runtime
from genctl.tree.commands import Continuation, Covered, Shown
from tests.cli.tool import genctl
from tests.tree.trees import explorer, stories

FOLDER = Path(resolve.__file__).parent / "builtin" / "stories"
AND, SAID = 300, 301


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with finite weights whose third layer overflows."""
    folder = shutil.copytree(FOLDER, tmp_path_factory.mktemp("models") / "overflowing")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.mlp.down_proj.weight"] *= 1e38
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


# each command that reads logits, with its exit status
COMMANDS = {
    "run": ("run -m MODEL Once -n 2", 1),
    "beam": ("beam -m MODEL Once -n 2", 1),
    "score": ("score -m MODEL Once", 1),
    "score --rank": ("score -m MODEL --rank --context Once there upon", 1),
    "score --stride": ("score -m MODEL --window 8 --stride 4 Once", 1),
    "explore --expand": ("explore -m MODEL Once --expand mass=0.5,depth=2", 3),
    "compare": ("compare -m MODEL -p greedy -p creative Once -n 2", 1),
    "parity": ("parity MODEL MODEL@threads=1 --texts TEXTS", 1),
    "parity --save": ("parity MODEL --texts TEXTS --save GOLDEN", 2),
    "inspect-cache": ("inspect-cache -m MODEL Once", 1),
    "chat": ("chat -m MODEL Once -n 2", 1),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_names_where_logits_are_not_finite(name: str, overflowing: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.write_text("Once upon a time\n")
    line, status = COMMANDS[name]
    names = {"MODEL": str(overflowing), "TEXTS": str(texts), "GOLDEN": str(tmp_path / "golden")}
    words = line
    for key, value in names.items():
        words = words.replace(key, value)
    done = genctl(*words.split())
    assert done.status == status
    assert "the model's logits are not finite" in done.err + done.out
    assert "this is a bug" not in done.err


@pytest.mark.parametrize("command", ["show 3", "find a", "why", "take 1", "generate 2", "sample 2 2", "beams 2 2",
                                     "edit there", "expand depth=2"])  # fmt: skip
def test_every_command_of_a_tree_names_the_place(command: str, overflowing: Path) -> None:
    session = Session.load(Runtime(model=str(overflowing)))
    tree = explorer(session=session)
    with pytest.raises(ModelError, match="the model's logits are not finite at step 0"):
        list(tree.do(command))
    assert len(tree.tree) == 0  # nothing was written


def test_the_token_is_named_after_which_logits_are_not_finite(tmp_path: Path) -> None:
    folder = shutil.copytree(FOLDER, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] *= 2e37  # logits are large after the prompt, and overflow one token later
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    done = genctl("explore", "-m", str(folder), "Once", "--expand", "mass=0.5,depth=2")
    assert done.status == 3
    assert "not finite at step 1, after the token ' upon'" in done.err


def test_a_grammar_that_other_settings_cut_off_has_a_dead_end_of_probability_0() -> None:
    """After either word the grammar expects a mark, which is suppressed; after one of them it may also end."""
    V = stories().forward.vocab_size
    marks = [id for id in range(V) if "!" in stories().loaded.tokenizer.convert_ids_to_tokens(id)]
    tree = explorer(regex="( said!)|( an!?)", suppress_tokens=marks)
    found = list(tree.do("expand depth=9"))
    rows = [each for each in found if isinstance(each, Continuation)]
    assert {(row.text, row.dead) for row in rows} == {(" an", False), (" said", True)}
    dead = [row for row in rows if row.dead]
    assert rows[-len(dead) :] == dead  # they come last
    assert {row.total for row in dead} == {-float("inf")}
    assert {row.mass for row in dead} == {rows[-len(dead) - 1].mass}
    (covered,) = (each for each in found if isinstance(each, Covered))
    assert (covered.continuations, covered.dead_ends) == (len(rows) - len(dead), len(dead))
    assert covered.mass < 1.0


DEAD = ("no_repeat_ngram_size=1", f"suppress_tokens={[id for id in range(1536) if id not in (AND, SAID)]}")


def test_a_dead_end_is_shown_and_written_as_a_row() -> None:
    sets = [word for one in DEAD for word in ("--set", one)]
    done = genctl("explore", "Once", *sets, "--expand", "depth=4", "--format", "jsonl")
    assert done.status == 0
    rows = [json.loads(line) for line in done.out.splitlines()]
    assert [(row["dead"], row["total"], row["mass"]) for row in rows] == [(True, None, 0.0)] * 2
    assert "0 continuations cover 0% of the probability" in done.err
    assert "after 2 of them no token can follow" in done.err
    text = genctl("explore", "Once", *sets, "--expand", "depth=4", terminal=True)
    assert text.out.count("✗ no token can follow") == 2


def test_a_place_without_tokens_can_be_looked_at() -> None:
    """At a dead end each token is shown with probability 0 and the processor that removed it."""
    V = stories().forward.vocab_size
    tree = explorer(no_repeat_ngram_size=1, suppress_tokens=[id for id in range(V) if id not in (AND, SAID)])
    list(tree.do(f"take id:{AND} 0"))
    list(tree.do("end"))
    list(tree.do(f"take id:{SAID} 0"))
    list(tree.do("end"))
    distribution = tree.distribution(tree.tree.cursor)
    assert (distribution.processed == -float("inf")).all()
    (shown,) = list(tree.do("show 5"))
    assert isinstance(shown, Shown)
    assert all(each.chance == 0.0 and each.removed_by for each in shown.alternatives)
    (why,) = list(tree.do("why"))
    assert why.trace[-1].after == 0.0  # type: ignore[union-attr]
