"""Sound folders to spoil: checkpoints, a GGUF file, an adapter, saved prompts, and how the program is run on each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.cli.tool import genctl
from tests.hostile import files, prompts
from tests.tiny import checkpoint

_RUN = ("run", "the cat", "-n", "3", "--seed", "1", "--color", "never")


@dataclass(frozen=True)
class Sound:
    """A sound folder, and the command line for a copy of it."""

    folder: Path
    arguments: Callable[[Path], list[str]]
    spoil: Callable[[Path, Random], str] = files.spoil


def _with_prompt(base: Path) -> Callable[[Path], list[str]]:
    return lambda folder: [*_RUN, "-m", str(base), "--prompt-cache", str(folder / prompts.FILE)]


def folders(root: Path) -> dict[str, Sound]:
    """Each kind of folder, made below `root`; without those whose package is not installed."""

    def model(folder: Path) -> list[str]:
        return [*_RUN, "-m", str(folder)]

    made = {arch: Sound(checkpoint(arch, root / arch), model) for arch in ("gpt2", "llama", "t5")}
    made["templates"] = Sound(checkpoint("qwen2", root / "templates"), lambda folder: [*model(folder), "--chat"])
    (made["templates"].folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    for name, arch in (("prompt", "llama"), ("prompt-states", "jamba"), ("prompt-source", "t5")):
        base, folder = checkpoint(arch, root / f"of-{name}"), root / name
        folder.mkdir()
        saved = genctl("inspect-cache", "-m", str(base), "the cat", "--save-cache", str(folder / prompts.FILE))
        assert saved.status == 0, saved.err
        made[name] = Sound(folder, _with_prompt(base), prompts.spoil)
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
