"""The keys of `genctl explore`: one table for the bindings, the help and the documents."""

from __future__ import annotations

import json
from typing import NamedTuple

from rich.text import Text

from genctl.io.writers import escaped
from genctl.terminal import theme
from genctl.tree.commands import COMMANDS


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
    Key("u", "run('undo')", "u", "undo"),
    Key("w", "run('why', 'cursor')", "w", "what each processor did to the token at the cursor"),
    Key("c", "run('text', 'tip')", "c", "copy the text of the branch"),
    Key("colon", "type('')", ":", "type a command, as in --script; help, quit. → completes it, Esc leaves the line"),
    Key("e", "edit", "e", "type another text from here"),
    Key("s", "type('set ')", "s", "type a setting (min_p=0.05): the distribution changes at once"),
    Key("p", "type('preset ')", "p", "type the name of a preset"),
    Key("x", "type('expand mass=0.9,depth=6')", "x", "type how far to expand all continuations by joint probability"),
    Key("slash", "type('find ')", "/", "type a text, to find the alternatives that contain it"),
    Key("escape", "let_go", "Esc", "leave the line; else stop what runs"),
    Key("question_mark", "help", "?", "these keys, the columns and the commands"),
    Key("q", "leave", "q", "leave; the last line says where the tree is saved"),
    Key("ctrl+c", "stop_or_leave", "Ctrl+C", "stop what runs; if nothing runs, leave"),
    Key("", "", "click", "an alternative: select it, or take it if it is selected; a branch of the tree: go to it"),
)
COLUMNS = (
    ("rank", "place among all tokens, by the model's probability"),
    ("prob", "probability by the model"),
    ("logprob", "its natural logarithm"),
    ("final", "probability after the processors of the settings; –: removed"),
    ("removed by", "the processor that removed the token"),
    ("▸ •", "the token of this branch, and tokens that other branches have here"),
)


def markdown_table() -> str:
    """The table of the documents."""
    rows = [f"| `{key.shown}` | {key.about} |" for key in KEYS if key.shown]
    return "\n".join(("| key | what it does |", "|---|---|", *rows))


def help_text() -> Text:
    """The keys, the columns, and the commands of `:`."""
    sections = {
        "keys": [(key.shown, key.about) for key in KEYS if key.shown],
        "columns": list(COLUMNS),
        "commands of : and of --script": [(row.usage, row.about) for row in COMMANDS.values()],
    }
    lines: list[Text] = []
    for title, rows in sections.items():
        width = max(len(name) for name, _ in rows)
        lines.append(Text(title, theme.DIM))
        lines += [Text.assemble((f"{name:<{width}}", theme.HEADING), f"  {about}") for name, about in rows]
    return Text("\n").join(lines)


def edit_line(text: str) -> str:
    """The command that writes a text. Its control characters are escapes."""
    return f"edit {escaped(json.dumps(text, ensure_ascii=False))}"
