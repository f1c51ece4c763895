"""A stranger's folder, chat, tree, recording, golden file and journal: whatever they set, nothing leaves this machine.

Each sets every knob that is not free to an attacker's value. No server is asked, no key is sent, nothing is downloaded
or written, no code runs, and no file is shown.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from genctl.config.toml import write_value
from tests.cli.tool import Done, genctl
from tests.engines.server.stand_in import StandIn, running

KEY, SECRET = "sesame-sesame", "BEGIN-PRIVATE-KEY"
FREE_LAYER = {"origin": "flag", "said": "command", "typed": True, "values": {"max_new_tokens": 2}}


@dataclass
class Traps:
    """What an attack would leave behind."""

    server: StandIn
    folder: Path  # the stranger's
    secret: Path
    witness: Path  # made by code that runs
    written: Path  # made by a folder that is written to
    fetched: list[str]

    def values(self) -> dict[str, Any]:
        """An attacker's value for each knob that is not free."""
        plugin = [{"use": "evil:Processor"}]
        return {
            "backend": self.server.url,
            "offload_folder": str(self.written),
            "adapter": str(self.folder / "adapter"),
            "compile": True,
            "json_schema": str(self.secret),
            "grammar": str(self.secret),
            "prompt_cache": str(self.secret),
            "draft_corpus": str(self.secret),
            "processors": [*plugin, {"use": "grammar", "grammar": str(self.secret)}],
            "stopping": plugin,
            "model": "stranger/model",
            "revision": "//host/share",
            "tokenizer": "//host/share",
            "assistant_model": "stranger/model",
            "amateur_model": "stranger/model",
            "trust_remote_code": True,
            "allow_pickle": True,
            "allow_plugins": True,
        }

    def check(self, *runs: Done) -> None:
        """Nothing happened but messages."""
        assert (self.server.asked, self.fetched) == ([], [])
        assert not self.witness.exists()
        assert not self.written.exists()
        for done in runs:
            assert "Traceback" not in done.err
            assert SECRET not in done.out + done.err
            assert KEY not in done.out + done.err


@pytest.fixture
def traps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Traps]:
    """The current folder is the stranger's."""
    folder, secret = tmp_path / "stranger", tmp_path / "home/.ssh/id_rsa"
    for each in (folder / "presets", folder / "adapter", secret.parent):
        each.mkdir(parents=True)
    secret.write_text(f"start: {SECRET}\n{SECRET}\n")
    witness = tmp_path / "witness"
    (folder / "evil.py").write_text(f"open({str(witness)!r}, 'w')\nclass Processor: pass\n")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home/state"))
    monkeypatch.setenv("GENCTL_API_KEY", KEY)
    fetched: list[str] = []
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(
        "huggingface_hub.HfApi.model_info", lambda self, name, **rest: fetched.append(name) or _unreachable()
    )
    with running() as server:
        yield Traps(server, folder, secret, witness, tmp_path / "written", fetched)


def _unreachable() -> None:
    raise OSError("there is no network")


def test_a_folder_chooses_nothing(traps: Traps) -> None:
    lines = "".join(f"{key} = {write_value(value)}\n" for key, value in traps.values().items())
    Path("genctl.toml").write_text(lines)
    Path("pyproject.toml").write_text(f"[tool.genctl]\n{lines}")
    Path("presets/greedy.toml").write_text(lines)
    Path("presets/mine.toml").write_text(lines)
    for flags, status in (((), 0), (("-p", "greedy"), 0), (("-p", "mine"), 2)):
        done = genctl("run", *flags, "--allow-plugins", "--allow-pickle", "-n", "1", "Hi")
        assert done.status == status, done.err
        traps.check(done)


def test_a_row_names_no_code(traps: Traps) -> None:
    row = {"prompt": "Hi", "params": {"processors": [{"use": "evil:Processor"}]}}
    Path("rows.jsonl").write_text(json.dumps(row))
    done = genctl("run", "-i", "rows.jsonl", "--allow-plugins", "-n", "1")
    assert (done.status, "is code, which only the settings of the run can choose" in done.err) == (1, True)
    traps.check(done)


def chat(*arguments: str, turn: str = "Hi") -> Done:
    return genctl("chat", *arguments, "-n", "2", stdin=f"{turn}\n")


def change(path: Path, edit: Callable[[list[dict[str, Any]]], object]) -> Path:
    """Change the lines of a file, as values."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    edit(lines)
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def layered(values: dict[str, Any]) -> Callable[[list[dict[str, Any]]], object]:
    def edit(lines: list[dict[str, Any]]) -> None:
        if "settings" in lines[0]:  # a chat
            lines[0]["settings"].append({"origin": "flag", "kind": "command", "typed": True, "values": values})
        else:
            lines[0].setdefault("layers", []).append({**FREE_LAYER, "values": values})

    return edit


@pytest.fixture
def saved(traps: Traps) -> Path:
    """A chat with a checkpoint of this machine."""
    path = Path("chat.jsonl")
    assert chat("--save", str(path)).status == 0
    return path


def test_a_chat_leaves_out_what_it_may_not_set_and_says_so(traps: Traps, saved: Path) -> None:
    values = {key: value for key, value in traps.values().items() if key != "model"}
    change(saved, layered(values))
    done = chat("--open", str(saved))
    assert done.status == 0, done.err
    traps.check(done)
    for key in values:
        assert f"note: the chat's {key} = " in done.err, key
    words = "is not used: it is no setting of a saved file; --backend sets it"
    assert f'note: the chat\'s backend = "{traps.server.url}" {words}\n' in done.err


@pytest.mark.parametrize("key", ["processors", "assistant_model"])
def test_flags_of_trust_do_not_hold_for_what_a_chat_names(traps: Traps, saved: Path, key: str) -> None:
    value: Any = [{"use": "evil:Processor"}] if key == "processors" else str(traps.folder)
    change(saved, layered({key: value}))
    done = chat("--open", str(saved), "--allow-plugins", "--allow-pickle", "-m", "builtin:stories")
    assert (done.status, f"the chat's {key} = " in done.err) == (0, True), done.err
    traps.check(done)
    change(saved, lambda lines: lines[0].update(model=str(traps.folder)))
    done = chat("--open", str(saved), "--trust-remote-code")
    assert (done.status, "--trust-remote-code would run code of" in done.err) == (2, True)
    traps.check(done)


def test_a_chat_names_no_checkpoint_to_download(traps: Traps, saved: Path) -> None:
    change(saved, lambda lines: lines[0].update(model="stranger/model"))
    done = chat("--open", str(saved))
    assert (done.status, "hint: --model stranger/model downloads it" in done.err) == (3, True), done.err
    traps.check(done)


@pytest.mark.parametrize("key", ["json_schema", "assistant_model", "backend", "compile", "adapter"])
def test_the_changes_of_a_chat_are_the_files_too(traps: Traps, saved: Path, key: str) -> None:
    text = write_value(traps.values()[key])

    def edit(lines: list[dict[str, Any]]) -> None:
        lines += [{"set": f"{key}={text}"}, {"preset": f"{traps.secret}.toml"}]

    done = chat("--open", str(change(saved, edit)))
    assert (done.status, f"note: the chat's {key} = " in done.err) == (0, True), done.err
    assert "note: the chat's preset = " in done.err
    traps.check(done)


def test_what_the_user_sets_too_holds(traps: Traps, saved: Path) -> None:
    schema = Path("schema.json")
    schema.write_text('{"const": "x"}')
    change(saved, layered({"json_schema": str(schema)}))
    assert "the chat's json_schema" in chat("--open", str(saved)).err
    done = genctl("chat", "--open", str(saved), "-n", "8", "--json-schema", str(schema), stdin="Hi\n")
    assert (done.status, done.out.strip(), "json_schema" in done.err) == (0, '"x"', False), done.err


def test_a_chat_with_a_server_goes_on_where_the_user_says(traps: Traps) -> None:
    path = Path("chat.jsonl")
    assert chat("--backend", traps.server.url, "--save", str(path)).status == 0
    traps.server.asked.clear()
    done = chat("--open", str(path))
    assert (done.status, done.out) == (2, "")
    assert "is a chat with a server, and a checkpoint here cannot continue it\nhint: --backend URL" in done.err
    traps.check(done)
    assert chat("--open", str(path), "--backend", traps.server.url).status == 0


def explore(path: Path, *flags: str, script: str = "generate 1\n") -> Done:
    return genctl("explore", "--open", str(path), "--script", "-", *flags, stdin=script)


@pytest.mark.parametrize(
    ("head", "words"),
    [
        ({"knobs": {"adapter": "adapter"}}, "the golden file says adapter adapter"),
        ({"dtype": "load"}, ""),
        ({"knobs": {"runtime": "evil"}}, ""),
        ({"knobs": {"quantize": "int8", "backend": "openai:http://127.0.0.1:9", "compile": True}}, ""),
    ],
)
def test_a_golden_file_loads_nothing_that_it_names(traps: Traps, head: dict[str, Any], words: str) -> None:
    path = Path("golden.jsonl")
    assert genctl("parity", "builtin:stories", "Once upon a time", "--save", str(path), "-n", "2").status == 0
    lines = [json.loads(line) for line in path.read_text().splitlines()[:-1]]
    lines[0].update(head)
    lines[2]["top"][0][1] -= 0.5  # so that the weights of the reference matter
    body = "".join(f"{json.dumps(line)}\n" for line in lines)
    end = {"kind": "end", "lines": len(lines), "sha256": hashlib.sha256(body.encode()).hexdigest()}
    path.write_text(f"{body}{json.dumps(end)}\n")
    done = genctl("parity", "builtin:stories", "--expect", str(path))
    assert done.status in (0, 2, 4), done.err
    assert words in done.out + done.err
    traps.check(done)


def test_a_journal_chooses_nothing(traps: Traps) -> None:
    Path("rows.txt").write_text("One\nTwo\n")
    run = ("run", "-i", "rows.txt", "-o", "out.jsonl", "-n", "1", "--seed", "1")
    assert genctl(*run, "--resume").status == 0
    journal = Path("out.jsonl.journal")
    assert journal.exists()
    head, *rest = journal.read_text().splitlines(keepends=True)
    data = json.loads(head)
    data.setdefault("settings", {}).update(traps.values())
    journal.write_text(json.dumps(data) + "\n" + "".join(rest))
    done = genctl(*run, "--resume")
    assert done.status in (0, 2), done.err
    traps.check(done)
