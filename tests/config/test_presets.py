"""Finding presets, extending them, and reading arbitrary files: an error is always one of ours."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from genctl.config import presets
from genctl.config.layers import resolve
from genctl.config.toml import lines_of, parse
from genctl.errors import PresetError
from tests.cli.tool import genctl

SHIPPED = sorted(path.stem for path in presets.shipped_folder().glob("*.toml"))
QUIET = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def write(path: str, text: str) -> Path:
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


def test_the_presets_that_were_promised_are_shipped() -> None:
    promised = "greedy creative precise nucleus min-p typical mirostat no-repeat chat seq2seq long-form ci-smoke"
    assert set(promised.split()) <= set(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_preset_is_right_and_says_what_it_is_for(project: Path, name: str) -> None:
    loaded = presets.load([name])
    job = resolve(loaded)
    assert 20 <= len(loaded[-1].values["about"]) <= 110
    assert job.notes == ()
    set_here = {key for layer in loaded for key in layer.values} - {"about", "processors", "stopping"}
    assert set_here, "a preset that sets nothing"
    assert all(job.origins[key] != "default" for key in set_here), "a knob that is moot in its own preset"


def test_a_name_is_looked_up_in_the_users_folder_then_the_wheel(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("presets/greedy.toml", "")
    assert presets.find("greedy") == presets.shipped_folder() / "greedy.toml"
    mine = write(str(tmp_path / "home/config/genctl/presets/greedy.toml"), "")
    assert presets.find("greedy") == mine
    with pytest.raises(PresetError, match="preset nuclues: no such preset; did you mean nucleus"):
        presets.find("nuclues")
    monkeypatch.setenv("XDG_CONFIG_HOME", "here")
    assert presets.config_home() == tmp_path / "home/.config/genctl"


@pytest.mark.parametrize("name", ["./greedy.toml", "greedy.toml", "sub/greedy"])
def test_a_path_is_a_path(project: Path, name: str) -> None:
    assert presets.find(name) == Path(name)


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a b", "a\n", "a\0", "grün", "a;b", "$HOME", "~"])
def test_what_is_no_name_is_refused(project: Path, name: str) -> None:
    with pytest.raises(PresetError, match="a name has only letters"):
        presets.find(name)


@pytest.mark.parametrize(
    "path", ["~nobody-at-all/x.toml", "a\0b.toml", "x" * 5000 + ".toml", "\n.toml", "/proc/self/mem/x.toml"]
)
def test_a_path_to_nowhere_is_told_in_one_line(project: Path, path: str) -> None:
    with pytest.raises(PresetError) as caught:
        resolve(presets.load([path]))
    assert caught.value.message.isprintable()


def test_extending_a_file_through_a_link_out_of_the_folder_is_refused(project: Path, tmp_path: Path) -> None:
    (project / "base.toml").symlink_to(write(str(tmp_path / "secret.toml"), "seed = 3"))
    write("job.toml", 'extends = "./base.toml"')
    with pytest.raises(PresetError, match="leads out of the folder of the file"):
        resolve(presets.load(["job.toml"]))


def test_a_preset_extends_no_file_of_the_home_folder(project: Path, tmp_path: Path) -> None:
    write(str(tmp_path / "home/base.toml"), "seed = 3")
    write("job.toml", 'extends = "~/base.toml"')
    with pytest.raises(PresetError, match="no such file"):
        resolve(presets.load(["job.toml"]))
    write("settings.toml", 'preset = "~/base.toml"')
    assert resolve(presets.file_layers(Path("settings.toml"), key="preset")).runtime.seed == 3
    write("settings.toml", 'preset = "~nobody-at-all/base.toml"\ntop_k = -1')
    with pytest.raises(PresetError) as caught:
        resolve(presets.file_layers(Path("settings.toml"), key="preset"))
    assert [line.split(": ")[0] for line in caught.value.message.splitlines()] == ["settings.toml:1", "settings.toml:2"]


def test_several_presets_layer_left_to_right(project: Path) -> None:
    write("a.toml", "seed = 1\nmax_new_tokens = 1")
    write("b.toml", "seed = 2")
    job = resolve(presets.load(["a.toml", "b.toml"]))
    assert (job.runtime.seed, job.generation.max_new_tokens) == (2, 1)
    assert job.origins["seed"] == "b.toml:1"
    assert resolve(presets.load(["b.toml", "a.toml"])).runtime.seed == 1
    assert resolve(presets.load(["a.toml", "b.toml", "a.toml"])).runtime.seed == 1


def test_a_preset_stands_above_what_it_extends_and_those_left_to_right(project: Path) -> None:
    write("a.toml", "seed = 1\nmax_new_tokens = 1\nbatch_size = 1")
    write("b.toml", "seed = 2\nmax_new_tokens = 2")
    write("job.toml", 'extends = ["a.toml", "b.toml"]\nseed = 3')
    job = resolve(presets.load(["job.toml"]))
    assert (job.runtime.seed, job.generation.max_new_tokens, job.runtime.batch_size) == (3, 2, 1)


def test_a_file_that_two_extend_is_laid_down_once(project: Path) -> None:
    write("base.toml", "seed = 0")
    write("a.toml", 'extends = "base.toml"\nseed = 1')
    write("b.toml", 'extends = "base.toml"\nbatch_size = 2')
    write("job.toml", 'extends = ["a.toml", "b.toml"]')
    assert resolve(presets.load(["job.toml"])).runtime.seed == 1


def test_a_circle_is_refused_with_its_chain(project: Path) -> None:
    for name, other in (("a", "b"), ("b", "c"), ("c", "b")):
        write(f"{name}.toml", f'extends = "{other}.toml"')
    with pytest.raises(PresetError, match=r"^b\.toml: extends itself: b\.toml -> c\.toml -> b\.toml$"):
        resolve(presets.load(["a.toml"]))


def test_a_fan_of_presets_is_read_in_no_time(project: Path) -> None:
    for number in range(15):
        write(f"p{number}.toml", f'extends = ["./p{number + 1}.toml", "p{number + 1}.toml"]')
    write("p15.toml", "seed = 5")
    assert len(presets.load(["p0.toml"])) == 16


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("top_k=5", "top_k", 5),
        ("do_sample=true", "do_sample", True),
        ("system=Hi there", "system", "Hi there"),
        ('system="Hi\\nthere"', "system", "Hi\nthere"),
        ("system=", "system", ""),
        ("system=5", "system", "5"),
        ("system=5 # five", "system", "5 # five"),
        ("revision=1234567", "revision", "1234567"),
        ("system=2024-01-01", "system", "2024-01-01"),
        ("system=[1, 2]", "system", "[1, 2]"),
        ("system=1\nseed=2", "system", "1\nseed=2"),
        ("stop_strings=[\"a\", 'b']", "stop_strings", ["a", "b"]),
        ("logit_bias={a = 1.0}", "logit_bias", {"a": 1.0}),
        ("temperature=.5", "temperature", 0.5),
        ("seed=007", "seed", 7),
        ("nonsense=.5", "nonsense", 0.5),
        ("max-new-tokens=3", "max_new_tokens", 3),
    ],
)
def test_set_reads_toml_else_the_bare_text(text: str, key: str, value: object) -> None:
    layer = presets.parse_set(text)
    assert layer.values == {key: value}
    assert type(layer.values[key]) is type(value)
    assert layer.place(key) == f"--set {key}"


@pytest.mark.parametrize("text", ["", "top_k", "=5", "extends=a"])
def test_what_is_no_setting_is_refused_by_name(text: str) -> None:
    with pytest.raises(PresetError, match=r"^--set"):
        presets.parse_set(text)


def test_all_wrong_sets_are_told_at_once_and_of_two_the_later_holds() -> None:
    with pytest.raises(PresetError) as caught:
        resolve(presets.parse_sets(["a", "b", "seed=1"]))
    assert len(caught.value.message.splitlines()) == 2
    assert presets.parse_sets(["seed=1", "seed=2"])[0].values == {"seed": 2}
    assert presets.parse_sets([]) == []


@pytest.mark.parametrize("text", ["top_k=five", "top_k=", "tpo_k=5", "trust_remote_code=true", "seed=1\nmodel=2"])
def test_a_wrong_value_names_set(text: str) -> None:
    with pytest.raises(PresetError, match=r"^--set "):
        resolve(presets.parse_sets([text]))


KEYS = st.sampled_from(["top_k", "seed", "about", "extends", '"a b"', '""', "a.b", "'\\'", '"\\u001b"'])
VALUES = st.sampled_from([
    "1", "true", "-nan", "07:32:00", "''", '"""\ntop_k = 1\n[seed]"""', "'''\n[top_p]\nseed = 2\n'''", '"a # b"',
    "[1, [2]]", '["a",\n "b"]', '{a = 1, "b" = [2]}', '"greedy"', '"\\uD7FF"', "9" * 5000,
])  # fmt: skip
STATEMENTS = st.one_of(
    st.tuples(KEYS, VALUES).map(" = ".join),
    KEYS.map(lambda key: f"[{key}]"),
    KEYS.map(lambda key: f"[[{key}]]"),
    st.text(max_size=10).map(lambda text: "# " + text),
    st.text(max_size=10),
)


def test_the_line_of_a_key_is_where_its_statement_or_table_begins() -> None:
    text = '# top_k = 1\ntop_k = 5\nban = [\n  "a",\n]\n"seed" = 3\n[[processors]]\nuse = "top_k"\ntop_k = 4\n'
    found = lines_of(text)
    assert {key: found[key] for key in parse(text, "job.toml")} == {"top_k": 2, "ban": 3, "seed": 6, "processors": 7}


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("logit_bias", '{" fox": -5}', {" fox": -5}),
        ("logit_bias", '{" fox" = -5}', {" fox": -5}),
        ("chat_template_kwargs", '{"enable_thinking": false, "x": null}', {"enable_thinking": False, "x": None}),
        ("stop_strings", '["a", "\\ud83d\\ude00\\/"]', ["a", "\U0001f600/"]),
        ("stop_strings", "['a']", ["a"]),
        ("stop_strings", "[INST]", "[INST]"),
        ("stop_strings", "{user}", "{user}"),
        ("stop_strings", '["[\\"a\\"]"]', ['["a"]']),
        ("force_words", '[["a", "b"], "c"]', [["a", "b"], "c"]),
        ("thinking_tags", '["<t>", "</t>"]', ["<t>", "</t>"]),
        ("stop_regex", "[\"']x", "[\"']x"),
        ("json_schema", '{"type": "object"}', '{"type": "object"}'),
    ],
)
def test_a_list_or_table_is_read_as_json_and_as_toml(key: str, text: str, value: object) -> None:
    assert presets.parse_value(key, text) == value


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--logit-bias", '{" fox": }'), "flag --logit-bias: logit_bias = "),
        (("--set", 'logit_bias={" fox": }'), "neither JSON nor TOML: expected a value at column 10"),
        (("--stop-token-ids", "[1,2"), "neither JSON nor TOML: expected a comma or a closing bracket"),
        (("--stop-strings", "x", "--stop-strings", '["a"'), 'put a text that begins like this in a list: ["[\\"a\\""]'),
        (("--stop-strings", '["a", 1]'), "item 2 must be a string, not a whole number"),
        (("--stop-strings", '{"a": 1}'), "must be a string or a list of strings, not a table"),
        (("--logit-bias", '{"a": 1, "a": 2}'), "the key 'a' occurs twice"),
    ],
)
def test_json_that_cannot_be_read_is_one_line(arguments: tuple[str, ...], words: str) -> None:
    done = genctl("run", *arguments, "Hi")
    assert done.status == 2
    assert words in done.err
    assert done.err.count("error:") == 1


def test_a_flag_that_may_be_repeated_takes_json_lists_too(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--stop-strings", '["a","b"]', "--stop-strings", "c", "--logit-bias", '{" fox": -5}')
    done = genctl("run", "--dry", *words, "Hi")
    assert 'stop_strings = ["a", "b", "c"]' in done.out
    assert 'logit_bias = { " fox" = -5.0 }' in done.out
    monkeypatch.setenv("GENCTL_STOP_STRINGS", '["d", "e"]')
    assert 'stop_strings = ["d", "e"]' in genctl("run", "--dry", "Hi").out
    one = 'a:logit_bias={" fox": -5},stop_strings=["x", "y"]'
    compared = genctl("compare", "--dry", "--strategy", one, "--strategy", "greedy", "Hi")
    assert 'stop_strings = ["x", "y"]' in compared.out, compared.err
