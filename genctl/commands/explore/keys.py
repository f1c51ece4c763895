"""The keys of `genctl explore`: one table for the bindings, the help and the documents."""

from __future__ import annotations

from typing import NamedTuple


class Key(NamedTuple):
    """One key, or several that do the same kind of thing."""

    keys: str  # as Textual names them, with commas; "" where Textual's own widgets take the key
    action: str
    shown: str  # as people read it
    about: str


KEYS = (
    Key("left", "move('left')", "←", "the token before"),
    Key("right", "move('right')", "→", "the next token"),
    Key("home", "move('start')", "Home", "the beginning of the branch"),
    Key("end", "move('end')", "End", "the end of the branch"),
    Key("", "", "↑ ↓ PgUp PgDn", "another alternative; in the tree, another branch"),
    Key("", "", "Tab", "to the tree and back to the alternatives"),
    Key("", "", "Enter", "take the alternative and generate on; in the tree, go to the branch"),
    Key("space", "pause", "Space", "generate on from the end of the branch; while something runs, stop it"),
    Key("1", "run('sample 1', 'cursor')", "1 … 9", "sample so many continuations from here"),
    *(Key(str(digit), f"run('sample {digit}', 'cursor')", "", "") for digit in range(2, 10)),
    Key("b", "run('beams', 'cursor')", "b", "beam search from here"),
    Key("e", "edit", "e", "write another text from here (a token that it cuts is healed)"),
    Key("u", "run('undo')", "u", "undo"),
    Key(
        "s",
        "ask('setting', 'a setting or a preset: min_p=0.05, temperature=1.2, beam5')",
        "s",
        "change a setting (min_p=0.05) or a preset: the distribution changes at once",
    ),
    Key(
        "x",
        "ask('expand', 'expand up to: mass=0.9,depth=6', 'mass=0.9,depth=6')",
        "x",
        "expand all continuations by joint probability, up to a mass and a depth",
    ),
    Key("w", "run('why', 'cursor')", "w", "what each processor did to the token at the cursor"),
    Key("slash", "ask('filter', 'filter the alternatives')", "/", "filter the alternatives by text"),
    Key("c", "run('text', 'tip')", "c", "copy the text of the branch"),
    Key(
        "colon",
        "ask('command', 'a command: goto 12, sample 3 40, find TEXT; help lists them')",
        ":",
        "a command, as in --script; help, quit. → completes it, Esc leaves the line",
    ),
    Key("escape", "let_go", "Esc", "stop what runs; remove the filter"),
    Key("question_mark", "help", "?", "these keys, the mouse, the columns and the commands"),
    Key("q", "leave", "q", "leave; the last line says where the tree is saved"),
    Key("ctrl+c", "stop_or_leave", "Ctrl+C", "stop what runs; if nothing runs, leave"),
    Key("", "", "click", "a token of the text: move there; a row: select it; a branch of the tree: go to it"),
    Key("", "", "click again", "an alternative that is selected: take it and generate on"),
)
COLUMNS = (
    ("rank", "place among all tokens, by the model's probability"),
    ("prob", "probability by the model"),
    ("logprob", "its natural logarithm; the line below the rows has it for the selected token"),
    ("final", "probability after the processors of the settings; –: removed"),
    ("changed by", "the processors that removed the token or changed it alone"),
    ("▸ •", "the token of this branch, and tokens that other branches have here"),
)


def markdown_table() -> str:
    """The table of the documents."""
    rows = [f"| `{key.shown}` | {key.about} |" for key in KEYS if key.shown]
    return "\n".join(("| key | what it does |", "|---|---|", *rows))
