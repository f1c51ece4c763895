"""No command ever shows a password or a key in an address, however it is written."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from genctl.commands.app import COMMANDS
from genctl.errors import hide_secrets, without_secrets
from tests.cli.tool import genctl, ok

# user and password, no part of which may appear in a message
USERS = [
    "zq1:zq2@zq3",
    "zq1:zq2%40zq3",
    "zq1:zq2:zq3",
    "zq1:zq2/zq3",
    "zq1:zq2?zq3",
    "zq1:zq2#zq3",
    ":zq2zq3",
    "zq1zq2",
]
USERS += ["zq1:", "zq1:8080/zq2", "zq1:zq2=zq3", "zq1:zq2@zq3=zq4"]
DECODING = ["run", "beam", "chat", "score", "compare", "parity", "explore", "inspect-cache"]
assert set(DECODING) < set(COMMANDS)


def leaked(text: str) -> list[str]:
    return re.findall(r".{,20}zq\d.*", text)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, which holds no settings."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("user", USERS)
def test_the_password_of_an_address_is_hidden(user: str) -> None:
    for whole in ("http://{}@host", "openai:https://{}@host:80/v1", "error: ray://{}@[::1]:80@dtype=x: no", "a://b {}"):
        text = whole.format(f"http://{user}@h" if "{}" not in whole.partition("://")[2] or " {}" in whole else user)
        assert leaked(without_secrets(text)) == []
        assert without_secrets(without_secrets(text)) == without_secrets(text)
        assert "host" in without_secrets(text) or "host" not in text


@pytest.mark.parametrize(
    "address",
    ["http://host:80/v1", "http://host/@name/x", "http://host@model=a", "http://h/v1@a=b,c=d", "https://[::1]:80@x=1"],
)
def test_an_address_without_one_is_shown(address: str) -> None:
    for text in (address, f"openai:{address}", f"see {address} and me@home", f"{address},openai:{address}"):
        assert without_secrets(text) == text


@pytest.mark.parametrize(
    "name", ["key", "api_key", "apiKey", "access-token", "client_secret", "password", "sig", "X-Amz-Signature", "auth"]
)
def test_keys_in_a_query_are_hidden(name: str) -> None:
    text = f"http://host/v1?design=a&{name}=zq1&more=b#c"
    assert without_secrets(text) == f"http://host/v1?design=a&{name}=(secret)&more=b#c"


def test_a_setting_is_an_address_as_a_whole() -> None:
    found = hide_secrets({"backend": ["openai:http://zq1:zq2 zq3@host/v1", "x"], "seed": 3, "a": ("http://zq1@h",)})
    assert found == {"backend": ["openai:http://(secret)@host/v1", "x"], "seed": 3, "a": ("http://(secret)@h",)}


@pytest.mark.parametrize("command", DECODING)
@pytest.mark.parametrize("user", ["zq1:zq2@zq3", "zq1:zq2%40zq3/zq4"])
def test_no_command_shows_the_password_of_a_setting(
    command: str, user: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"openai:http://{user}@127.0.0.1:1/v1"
    user_file = place / "config" / "genctl" / "config.toml"
    user_file.parent.mkdir(parents=True)
    settings = f"backend = {json.dumps(address)}\n"
    ways: list[tuple[str, ...]] = [("--backend", address), ("--set", settings.strip()), ("variable",), ("user file",)]
    ways += [("-m", address.removeprefix("openai:")), ("-p", "./job.toml")]
    Path("job.toml").write_text(settings)
    for way in ways:
        with monkeypatch.context() as patch:
            if way == ("variable",):
                patch.setenv("GENCTL_BACKEND", address)
            if way == ("user file",):
                user_file.write_text(settings)
            flags = way if len(way) > 1 else ()
            for more in ((), ("--dry",)):
                done = genctl(command, "x", *flags, *more, stdin="")
                assert leaked(done.out + done.err) == [], (way, more)
        user_file.unlink(missing_ok=True)


@pytest.mark.parametrize("user", USERS)
def test_presets_show_no_password(user: str, place: Path) -> None:
    folder = place / "config" / "genctl" / "presets"
    folder.mkdir(parents=True)
    address = f"http://{user}@127.0.0.1:1/v1"
    (folder / "mine.toml").write_text(f'about = "for {address}"\nbackend = "openai:{address}"\n')
    (folder / "broken.toml").write_text(f'"{address}" = "{address}"\n')
    for arguments in (
        ("list",), ("list", "--format", "json"), ("show", "mine"), ("show", "mine", "--raw"), ("show", "broken"),
        ("check", "mine"), ("check", "broken", "mine"),
    ):  # fmt: skip
        done = genctl("presets", *arguments, stdin="")
        assert leaked(done.out + done.err) == [], arguments


def test_a_recording_of_another_shows_no_password(place: Path) -> None:
    assert genctl("run", "Once", "-n", "2", "--events", "events.jsonl", stdin="").status == 0
    recording = place / "events.jsonl"
    recording.write_text(recording.read_text().replace("builtin:stories", "openai:http://zq1:zq2@zq3@host/v1"))
    done = ok("report", "events.jsonl", "-o", "page.html", stdin="")
    assert leaked(done.out + done.err) == []
    page = (place / "page.html").read_text()
    assert leaked(page) == []
    assert "openai:http://(secret)@host/v1" in page


@pytest.mark.parametrize("token", ["hf_" + "aB3" * 8, "api_org_" + "x" * 20])
def test_a_token_of_the_hub_is_hidden_wherever_it_comes_from(token: str) -> None:
    """Also in a reply or a file name, and if it is not the environment's own."""
    assert without_secrets(f"401 for {token}, see the log") == "401 for (token), see the log"
