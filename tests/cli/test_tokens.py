"""Ids and pieces of texts, without loading a model; a checkpoint without a tokenizer continues token ids."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

import genctl as library
from genctl.models.resolve import BUILTIN
from tests.cli.tool import genctl, ok
from tests.tiny import checkpoint, tiny

STORIES = BUILTIN / "stories"
TEXTS = ("Once upon a time", "naïve 🦊 日本語 fox", "a  b\tc\n\nd", "<bos>Once", "e\u0301", "👩‍👩‍👧 👍🏽!", " x ")


def stories(folder: Path, *, config: dict[str, Any] | None = None, template: str | None = None) -> Path:
    """The tokenizer of the built-in stories, with other fields of tokenizer_config.json; there are no weights."""
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(STORIES / name, folder)
    file = folder / "tokenizer_config.json"
    fields = {**json.loads(file.read_text(encoding="utf-8")), **(config or {})}
    if template is not None:
        fields["chat_template"] = template
    file.write_text(json.dumps(fields), encoding="utf-8")
    return folder


def test_a_pipe_gets_a_line_for_each_token() -> None:
    done = genctl("tokens", "naïve\n🦊", "b")
    assert (done.status, done.err) == (0, "")
    first, second = done.out.split("\n\n")
    assert first.splitlines() == [
        "1\t<bos>\tspecial, added",
        "557\tna",
        "130\t<0xC3>\tc3",
        "110\t<0xAF>\taf → ï",
        "346\tve",
        "201\t\\n",
        "175\t<0xF0>\tf0",
        "256\t<0x9F>\t9f",
        "102\t<0xA6>\ta6",
        "235\t<0x8A>\t8a → 🦊",
    ]
    assert second.startswith("1\t<bos>\tspecial, added\n")


@pytest.mark.parametrize("model", ["builtin:stories", "builtin:numbers"])
def test_records_have_the_ids_of_the_tokenizer_and_lead_back_to_the_text(model: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(BUILTIN / model.partition(":")[2])
    records = genctl("tokens", "-m", model, "--format", "jsonl", *TEXTS).records
    assert [record["token_ids"] for record in records] == [tokenizer(text)["input_ids"] for text in TEXTS]
    for record in records:
        assert [token["id"] for token in record["tokens"]] == record["token_ids"]
        assert record["usage"] == {"prompt_tokens": len(record["token_ids"])}
    lines = "\n".join(map(json.dumps, records))
    back = genctl("tokens", "-m", model, "--decode", *JSONL, stdin=lines).records
    assert [record["text"] for record in back] == [tokenizer.decode(record["token_ids"]) for record in records]


JSONL = ("--input-format", "jsonl", "--format", "jsonl")


def test_a_conversation_is_the_prompt_of_a_run() -> None:
    row = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "system": "Be brief."})
    for words, stdin in ((("--chat", "--system", "Be brief.", "Hi", "--format", "jsonl"), None), (JSONL, row)):
        (run,) = genctl("run", "-n", "1", *words, stdin=stdin).records
        (read,) = genctl("tokens", *words, stdin=stdin).records
        assert (read["prompt"], read["usage"]["prompt_tokens"]) == (run["prompt"], run["usage"]["prompt_tokens"])


@pytest.mark.parametrize(
    ("words", "note"),
    [
        (("<bos>Once",), "the prompt begins with <bos> twice: the tokenizer writes it before each prompt"),
        (("Once<eos> <bos>",), "the text holds <eos>, <bos>, which are read as special tokens and not as text"),
        (("Once ",), "the text ends with a space, which is a part of the next word's token"),
        (("--chat", "a <eos>"), "message 1 holds <eos>, which is read as a special token"),
        (("--chat", "--system", "<eos>", "a"), "the system message holds <eos>"),
        (("--chat", "<bos>a"), "the prompt begins with <bos> twice: the chat template writes it before"),
        (("--chat", "--no-enable-thinking", "a"), "the chat template of builtin:stories does not use enable_thinking"),
        (("--decode", "1", "80"), ""),
        (("--decode", "42", "81"), ""),
        (("--decode", "42", "81", "80"), "the tokenizer reads this text as other ids: "),
        (("Once",), ""),
        (("Once\n",), ""),
        (("-m", "builtin:numbers", "12 "), ""),
        (("--chat", "Once "), ""),
    ],
)
def test_what_is_odd_about_a_prompt_is_said(words: tuple[str, ...], note: str) -> None:
    done = ok("tokens", *words)
    assert (f"note: {note}" in done.err) if note else done.err == ""
    assert genctl("tokens", "-q", *words).err == ""


def test_settings_of_what_is_written_are_refused() -> None:
    done = genctl("tokens", "--set", 'ban=["x"]', "--set", "min_k=2", "hi")
    assert (done.status, done.err.splitlines()) == (
        2,
        [f"error: {key} (--set {key}) has no effect: nothing is written" for key in ("ban", "min_k")],
    )
    assert genctl("tokens", "--set", "enable_thinking=true", "--chat", "hi").status == 0


def test_a_missing_bos_is_said(tmp_path: Path) -> None:
    name = str(stories(tmp_path, template="{{ messages[0].content }}"))
    done = genctl("tokens", "-m", name, "--chat", "a")
    why = "the tokenizer puts it before a text, and the chat template leaves it out"
    assert done.err == f"note: the prompt does not begin with <bos>: {why}\n"
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    content["post_processor"] = None
    file.write_text(json.dumps(content), encoding="utf-8")
    assert genctl("tokens", "-m", name, "--chat", "a").err == ""


def test_a_token_for_what_is_unknown_is_no_special_token_of_the_text() -> None:
    done = genctl("tokens", "-m", "builtin:numbers", "12 🦊")
    assert done.out.splitlines()[-2:] == ["2\t<unk>\tspecial, unknown", "1\t</s>\tspecial, added"]
    assert done.err == ""


def test_only_the_number_of_tokens() -> None:
    both = ("-m", "builtin:stories", "-m", "builtin:numbers")
    assert genctl("tokens", "--count", "a", "Once upon").out == "2\n3\n"
    assert genctl("tokens", "--count", *both, "a", "Once upon").out == "2\t3\n3\t11\n"
    assert (
        genctl("tokens", "--count", "--format", "tsv", "a").out == "id\tmodel\ttokens\terror\n0\tbuiltin:stories\t2\t\n"
    )
    assert genctl("tokens", "--count", "a", "Once upon", terminal=True, color="never").out == "2\n3\n"


def test_ids_come_in_every_form() -> None:
    for words in (("1", "580", "693"), ("1,580,693",), ("[1, 580, 693]",), ("1 580", "693")):
        assert genctl("tokens", "--decode", *words).out == "<bos>Once upon\n"
    lines = genctl("tokens", "--decode", stdin="580 693\n[42]\n580 x\n")
    assert lines.out == "Once upon\nH\n"
    assert (lines.status, lines.err) == (1, "error: text 3: 'x' is no token id, and --decode reads ids\n")
    (bad, good) = genctl(
        "tokens", "--decode", *JSONL, stdin='{"id": "a", "prompt_ids": [99999]}\n{"token_ids": [42]}'
    ).records
    assert bad["error"] == {"code": "input", "message": "the tokenizer of builtin:stories has no token 99999"}
    assert good["text"] == "H"


@pytest.mark.parametrize(
    ("words", "status", "error"),
    [
        (("--decode", "--count", "1"), 2, "--count counts the tokens of texts"),
        (("--decode", "--chat", "1"), 2, "--decode reads ids, and a chat template makes prompts"),
        (("--decode", "-m", "builtin:stories", "-m", "builtin:numbers", "1"), 2,
         "--decode: ids are those of one --model"),
        (("--no-enable-thinking", "a"), 1, "enable_thinking would change nothing: the prompt is not a chat"),
        (("-m", "owner/name", "a"), 3, "owner/name is not in the cache, and the Hub is not used (a tokenizer is read"),
        (("-m", "./nothing", "a"), 3, "no such folder: ./nothing"),
        (("--force", "a"), 2, "--force replaces an existing --output file, but there is no --output"),
        (("--report", "x", "a"), 2, 'no such option "--report"'),
        (("--temperature", "1", "a"), 2, 'no such option "--temperature"'),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(words: tuple[str, ...], status: int, error: str) -> None:
    done = genctl("tokens", *words)
    assert (done.status, done.out) == (status, "")
    assert done.err.startswith(f"error: {error}")


def test_a_folder_without_a_tokenizer_or_template_is_refused(tmp_path: Path) -> None:
    shutil.copy(STORIES / "config.json", tmp_path)
    done = genctl("tokens", "-m", str(tmp_path), "a")
    assert (done.status, "has no tokenizer" in done.err) == (3, True)
    shutil.copy(STORIES / "tokenizer.json", tmp_path)
    done = genctl("tokens", "-m", str(tmp_path), "--chat", "a")
    assert (done.status, "has no chat template" in done.err) == (3, True)
    assert genctl("tokens", "-m", str(tmp_path), "a").status == 0


@pytest.mark.parametrize("width", [40, 60, 80])
def test_tables_fit_the_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    for models in ((), ("-m", "builtin:stories", "-m", "builtin:numbers")):
        done = ok("tokens", *models, *TEXTS, "日本語" * 30, terminal=True, color="never")
        assert max(map(cell_len, done.out.splitlines())) <= width
        assert "\t" not in done.out


def test_no_weights_are_read_and_torch_is_not_imported(tmp_path: Path) -> None:
    stories(tmp_path)
    lines = [["Once"], ["--count", "Once"], ["--chat", "Once"], ["-m", str(tmp_path), "-m", "builtin:numbers", "Once"]]
    lines += [["--decode", "42"], ["--format", "jsonl", "Once"]]
    code = (
        "import sys, json; from genctl.commands.app import run\n"
        "for line in json.loads(sys.argv[1]):\n"
        "    assert run(['tokens', *line]) == 0, line\n"
        "    heavy = {'torch', 'transformers'} & set(sys.modules)\n"
        "    assert not heavy, f'{line} imports {heavy}'"
    )
    done = subprocess.run([sys.executable, "-c", code, json.dumps(lines)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_of_a_gguf_file_nothing_but_the_header_is_needed(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from tests.models.test_gguf_tokenizer import written

    path = written(tmp_path / "words.gguf", "llama", "llama")
    code = (
        "import sys\nfrom genctl.models.tokenizer_alone import TokenReader\n"
        f"reading = TokenReader({str(path)!r}).read('the </s>')\n"
        "assert [piece.special for piece in reading.pieces] == ['added', '', '', 'written'], reading\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    done = genctl("tokens", "-m", str(written(tmp_path / "bytes.gguf", "llama", "gpt2", pre="of-tomorrow")), "the")
    assert done.status == 3
    assert "bytes.gguf: tokenizer.ggml.pre is 'of-tomorrow', which genctl does not know" in done.err


def test_results_go_to_a_file_and_nothing_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "out.tsv"
    assert genctl("tokens", "-o", str(path), "Hi\t").status == 0
    head, first, *_ = path.read_text(encoding="utf-8").splitlines()
    assert head.split("\t") == ["id", "model", "position", "token_id", "text", "bytes", "special", "error"]
    assert first.split("\t") == ["0", "builtin:stories", "0", "1", "<bos>", "", "added", ""]
    assert genctl("tokens", "-o", str(path), "Hi").status == 2
    assert genctl("tokens", "-o", str(path), "--force", "Hi").status == 0


IDS = [5, 60, 250, 7]


@pytest.fixture(scope="module", params=["gpt2", "t5"])
def arch(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def bare(arch: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("bare")
    tiny(arch).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def whole(arch: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(checkpoint(arch, tmp_path_factory.mktemp("whole")))


@pytest.fixture
def rows(tmp_path: Path) -> str:
    file = tmp_path / "ids.jsonl"
    file.write_text(json.dumps({"prompt_ids": IDS}) + "\n")
    return str(file)


@pytest.mark.parametrize("more", [(), ("--do-sample", "--num-return-sequences", "2"), ("--num-beams", "3")])
def test_the_ids_are_those_of_the_checkpoint_with_its_tokenizer(
    more: tuple[str, ...], bare: str, whole: str, rows: str
) -> None:
    options = ("-i", rows, "-n", "6", "--seed", "3", "--format", "jsonl", "--top-logprobs", "2", *more)
    found, expected = genctl("run", "-m", bare, *options), genctl("run", "-m", whole, *options)
    assert (found.status, found.err) == (0, "")
    assert [one["token_ids"] for one in found.records] == [one["token_ids"] for one in expected.records]
    assert [one["logprob"] for one in found.records] == [one["logprob"] for one in expected.records]
    for one in found.records:
        assert (one["text"], one["prompt"]) == ("", "")
        assert [token["text"] for token in one["tokens"]] == [f"<{id}>" for id in one["token_ids"]]
        assert all(top[1] == f"<{top[0]}>" for token in one["tokens"] for top in token["top"])


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("command", ["run", "beam", "compare"])
def test_what_is_shown_are_ids(command: str, terminal: bool, bare: str, rows: str) -> None:
    ids = genctl("run", "-m", bare, "-i", rows, "-n", "4", "--num-beams", "5", "--format", "jsonl").records[0]
    options = ("-p", "greedy", "-p", "beam5") if command == "compare" else ("--num-beams", "5")
    done = ok(command, "-m", bare, "-i", rows, "-n", "4", *options, terminal=terminal)
    assert "".join(f"<{id}>" for id in ids["token_ids"]) in done.out


def test_caches_the_library_and_lines_of_a_pipe_take_ids(bare: str, rows: str) -> None:
    done = ok("inspect-cache", "-m", bare, "-i", rows, "--steps", "2", "--format", "json")
    assert done.records[0]["prompt_tokens"] == 4
    (result,) = library.load(bare).generate([IDS], max_new_tokens=3)
    assert (result.text, len(result.sequences[0].token_ids)) == ("", 3)
    assert genctl("run", "-m", bare, "-n", "2", stdin="5 60\n").status == 3
    ok("run", "-m", bare, "-n", "2", "--input-format", "jsonl", stdin='{"prompt_ids": [5, 60]}\n')
    assert genctl("run", "-m", bare, "-i", rows, "-n", "3", "--fail-on", "empty").status == 0


def test_texts_among_ids_fail_as_rows(bare: str, tmp_path: Path) -> None:
    file = tmp_path / "mixed.jsonl"
    prompts = [{"prompt_ids": IDS}, {"prompt": "the cat"}, {"messages": [{"role": "user", "content": "x"}]}]
    file.write_text("".join(json.dumps(one) + "\n" for one in prompts))
    done = genctl("run", "-m", bare, "-i", str(file), "-n", "3", "--format", "jsonl")
    assert done.status == 1
    assert len(done.records[0]["token_ids"]) == 3
    for one in done.records[1:]:
        assert one["error"]["code"] == "model"
        assert one["error"]["message"].endswith("has no tokenizer: give prompt_ids instead of text")


@pytest.mark.parametrize("command", ["run", "beam", "compare", "inspect-cache", "score"])
def test_a_text_alone_is_refused_at_once(command: str, bare: str) -> None:
    runs = ("-p", "greedy", "-p", "beam5") if command == "compare" else ()
    done = genctl(command, "the cat", "-m", bare, *runs)
    assert (done.status, done.out) == (3, "")
    error, *hint = done.err.splitlines()
    assert error.startswith(f"error: {bare} has no tokenizer")
    assert command == "score" or "prompt_ids" in hint[0]


@pytest.mark.parametrize(
    "options",
    [
        ("--stop-strings", "x"),
        ("--bad-words", "x"),
        ("--json-schema", "{}"),
        ("--token-healing",),
        ("--do-sample", "--mbr-samples", "3"),
        ("--chat",),
    ],
)
def test_settings_that_need_a_text_are_refused(options: tuple[str, ...], bare: str, rows: str) -> None:
    done = genctl("run", "-m", bare, "-i", rows, "-n", "2", *options)
    assert done.status in (2, 3)
    assert "tokenizer" in done.err or "encoder-decoder" in done.err
    assert done.out == ""
