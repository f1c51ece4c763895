"""Sound folders for `files.spoil`: checkpoints, a GGUF file and an adapter, and how the program is run on each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.tiny import checkpoint

_RUN = ("run", "the cat", "-n", "3", "--seed", "1", "--color", "never")


@dataclass(frozen=True)
class Sound:
    """A sound folder, and the command line for a copy of it."""

    folder: Path
    arguments: Callable[[Path], list[str]]


def folders(root: Path) -> dict[str, Sound]:
    """Each kind of folder, made below `root`; without those whose package is not installed."""

    def model(folder: Path) -> list[str]:
        return [*_RUN, "-m", str(folder)]

    made = {arch: Sound(checkpoint(arch, root / arch), model) for arch in ("gpt2", "llama", "t5")}
    made["templates"] = Sound(checkpoint("qwen2", root / "templates"), lambda folder: [*model(folder), "--chat"])
    (made["templates"].folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    try:
        from tests.models.test_gguf import written
    except BaseException as error:  # pytest's Skipped is no Exception
        if type(error).__name__ != "Skipped":
            raise
    else:
        (root / "gguf").mkdir()
        written(root / "gguf" / "tiny.gguf")
        made["gguf"] = Sound(root / "gguf", lambda folder: model(folder / "tiny.gguf"))
    try:
        from tests.models.test_adapter import lora
    except BaseException as error:
        if type(error).__name__ != "Skipped":
            raise
    else:
        base = made["llama"].folder
        lora(base, root / "adapter")
        made["adapter"] = Sound(root / "adapter", lambda folder: [*model(base), "--adapter", str(folder)])
    return made
