"""The tokenizer of a GGUF file has the ids of llama.cpp.

Small vocabularies are made here, one for each rule, and `tests/data/gguf_ids.json` has a digest of the ids that
llama-tokenize (b11434) gave their texts. With `GENCTL_LLAMA_CPP` (a folder with llama.cpp's source and its programs)
the program itself is run on them and on the real vocabularies of its source; it also prints the digests:
`python -m tests.models.test_gguf_tokenizer`.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from genctl.errors import ModelError
from genctl.models import gguf_tokenizer
from genctl.models.gguf_tokenizer import SPLITS
from genctl.models.hub import load
from genctl.models.text import Detokenizer, decode
from genctl.models.tokenizer import PlainTokenizer
from genctl.models.tokenizer_alone import LoneTokenizer, find
from genctl.params import Runtime
from tests.tiny import tokenizer

gguf = pytest.importorskip("gguf")
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
GOLDEN = Path(__file__).parent.parent / "data" / "gguf_ids.json"
LLAMA_CPP = os.environ.get("GENCTL_LLAMA_CPP")
TEXTS = (
    "", " ", "  ", "    ", "\n", "\n\n", " \n \t\n", "\r\n\r\n", "\t\tx", "Hello world", " Hello  world ", "   three",
    "don't DON'T I'Ll we're 'S' 'x", "the's Türkiye'de", "1 12 123 1234 1234567 12345678", "a1b22c333 3.14 1,000",
    "²³ ½ ٣٤٥٦ Ⅷ x1y", "HelloWorld fooBar HTTPServer ABC123def", "naïve café ÀÉ ß Straße",
    "e\u0301 a\u0308\u0323 \u0301x", "日本語のテキスト 中文，测试。", "한국어 텍스트 ㄱㄴ", "привет мир ΑΒΓ",
    "हिन्दी ที่ภาษา عربي",
    "👩‍👩‍👧 🦙🦙 👍🏽", "x=a+b*c; if (x<=3) { return \"y\"; } // end", "!!! ??? ... -- == ## $5 €7 <|> ~^`",
    "(a|b),c. d!e?f…", "foo\n\n\n  bar\n\tbaz  \n", "path/to/file_name.txt\n/usr\n", "a\u00a0b\u2003c\u3000d\u2028e",
    "\0\x07\x7f\ufeff\u200b", "=========== ----- aaaaaaaaa", "a" * 9 + " " * 9 + "b", "the cat  sat on the mat.",
    "  the\n the", "<s>the</s>", "<s> the <tool> cat<tool><|end|>\n x <|end|> \t y",
    "<unk><|endoftext|> <|im_start|>user\nhi<|im_end|>\n", "<|user|>\nhi<|end|>\n<|assistant|>\n", "▁the ▁▁ Ġthe Ċ",
    "<0x0A><0xE2>", "ø ö À ÿ schön", "x'veto", "a  12", "a!\n\n\nb", "!\u3000!",
    "x\n\n\n\ny", "x" + " " * 8 + "y",
)  # fmt: skip
SPECIAL = [
    ("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL), ("<|end|>", CONTROL), ("<|user|>", CONTROL),
    ("<|assistant|>", CONTROL), ("<|im_start|>", CONTROL), ("<|im_end|>", NORMAL), ("<|endoftext|>", CONTROL),
    ("<tool>", USER), ("ø", USER),
    ("[PAD]", UNUSED),
]  # fmt: skip
BYTES = [(f"<0x{byte:02X}>", BYTE) for byte in range(256)]
Typed = Sequence[tuple[str, int]]


def write(
    path: Path, kind: str, typed: Typed, merges: Iterable[str] = (), scores: Sequence[float] = (), **more: Any
) -> Path:
    """A file of a vocabulary alone. `more` are keys that begin with `tokenizer.ggml.`, or with `general.`."""
    writer = gguf.GGUFWriter(path, more.pop("architecture", "llama"))
    writer.add_tokenizer_model(kind)
    writer.add_token_list([token for token, _ in typed])
    if "token_type" not in more:
        writer.add_token_types([kind for _, kind in typed])
    if merges := list(merges):
        writer.add_token_merges(merges)
    if scores:
        writer.add_token_scores(list(scores))
    for name, value in {"name": "none", **more}.items():
        key = {"name": "general.name", "chat_template": "tokenizer.chat_template"}.get(name, f"tokenizer.ggml.{name}")
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}
        add[type(value)](key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def written(path: Path, architecture: str, kind: str, **more: Any) -> Path:
    """A file with the words of the tests' own tokenizer."""
    if kind != "gpt2":
        return pieces(path, architecture=architecture, **more)
    held = json.loads(tokenizer().backend_tokenizer.to_str())["model"]
    typed = [(token, NORMAL) for token in sorted(held["vocab"], key=held["vocab"].get)]
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    return write(path, kind, typed, map(" ".join, held["merges"]), architecture=architecture, **{**ids, **more})


def byte_level(path: Path, pre: str, **more: Any) -> Path:
    """Each pair of bytes that the texts have side by side is a token: ids show where they are split."""
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    words = ["".join(part for part, _ in spelled(text)) for text in TEXTS]
    pairs = sorted({(word[at], word[at + 1]) for word in words for at in range(len(word) - 1)})
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    typed = [*SPECIAL[:-2], *((letter, NORMAL) for letter in letters if letter != "ø"), SPECIAL[-2]]
    typed += [(left + right, NORMAL) for left, right in pairs]
    pairs += [("ĠĠ", "Ġ"), ("ĊĊ", "Ċ")]
    typed += [(word, NORMAL) for word in ("ĠĠĠ", "ĊĊĊ", "Hello", "Ġthe", "123")]  # no merge makes the last three
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    return write(path, "gpt2", typed, map(" ".join, pairs), pre=pre, **{**ids, **more})


@cache
def parts() -> list[str]:
    """Letters of the texts, and what stands in them more than once."""
    texts = [text.replace(" ", "▁") for text in TEXTS]
    found = Counter(
        text[at : at + size] for text in texts for size in (2, 3, 4, 8) for at in range(len(text) - size + 1)
    )
    known = {token for token, _ in (*SPECIAL, *BYTES)}
    several = sorted(
        (part for part, count in found.items() if count > 1 and part not in known), key=lambda p: (-found[p], p)
    )
    letters = sorted({letter for text in texts for letter in text} - known)
    whole = {*letters}
    made = []  # each by a merge of parts that are there
    for part in sorted(several, key=len):
        if any({part[:at], part[at:]} <= whole for at in range(1, len(part))):
            whole.add(part)
            made.append(part)
    return [*sorted(made, key=lambda p: (-found[p], p)), *letters]


def pieces(path: Path, *, without: str = "🦙", equal: bool = False, **more: Any) -> Path:
    """SentencePiece's kind: scores fall from token to token, and letters such as 🦙 are bytes."""
    typed = [*SPECIAL, *BYTES, *((part, NORMAL) for part in parts() if part not in without)]
    scores = [-1000.0 if equal else -float(id) for id in range(len(typed))]
    return write(path, "llama", typed, scores=scores, **{"bos_token_id": 1, "eos_token_id": 2, **more})


def merged(path: Path) -> Path:
    """Gemma 4's kind: ▁ for spaces, and merges; BOS is added whatever the file says."""
    known = (*SPECIAL, ("<|tool_response>", USER), *BYTES)  # with the last, </s> is a normal token
    typed = [*known, *((part, NORMAL) for part in parts() if part != "🦙")]
    whole = {token for token, _ in typed}
    merges = [
        f"{part[:at]} {part[at:]}" for part in parts() for at in range(1, len(part)) if {part[:at], part[at:]} <= whole
    ]
    return write(path, "gemma4", typed, merges, bos_token_id=1, add_bos_token=False)


def unigram(path: Path, **more: Any) -> Path:
    typed = [*SPECIAL[:-2], *((part, NORMAL) for part in parts())]
    scores = [-1.0 - len(token) / 3 - id / 999 for id, (token, _) in enumerate(typed)]
    named = {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "add_space_prefix": True}
    return write(path, "t5", typed, scores=scores, **{**named, **more})


PIECES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, no prefix": {"add_space_prefix": False},
    "llama, no bos": {"add_bos_token": False},
    "llama, eos": {"add_eos_token": True},
    "llama, ids by default": {"bos_token_id": 99_999},
    "llama, Phi-3": {"name": "Phi-3 mini"},
    "llama, equal scores": {"equal": True},  # as its converter writes them for a tokenizer.json
    "llama, letters that are no tokens": {"without": "🦙the语日aо"},
}
BYTE_LEVEL: dict[str, dict[str, Any]] = {
    **{pre: {"pre": pre} for pre in sorted(SPLITS) if SPLITS[pre].by_bytes},
    "no pre": {"pre": ""},
    "llama-bpe, no bos": {"pre": "llama-bpe", "add_bos_token": False},
    "qwen2, bos and eos": {"pre": "qwen2", "add_bos_token": True, "add_eos_token": True},
    "gpt-2, bos by default": {"pre": "gpt-2", "add_bos_token": True, "bos_token_id": 99_999},
}
UNIGRAM: dict[str, dict[str, Any]] = {
    "t5": {"remove_extra_whitespaces": True, "add_bos_token": True},
    "t5, all spaces": {"add_eos_token": False},
}
NAMES = [*BYTE_LEVEL, *PIECES, *UNIGRAM, "gemma4"]


def made(name: str, path: Path) -> Path:
    """The vocabulary of a rule."""
    if name in BYTE_LEVEL:
        return byte_level(path, **BYTE_LEVEL[name])
    if name in PIECES:
        return pieces(path, **PIECES[name])
    return unigram(path, **UNIGRAM[name]) if name in UNIGRAM else merged(path)


def digest(ids: Sequence[Sequence[int]]) -> str:
    return hashlib.sha256(json.dumps(list(map(list, ids))).encode()).hexdigest()[:12]


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    words = gguf_tokenizer.plain(made(name, tmp_path / "words.gguf"))
    ids = [words.encode(text) for text in TEXTS]
    assert digest(ids) == json.loads(GOLDEN.read_text())[name]
    assert max(max(each, default=0) for each in ids) < len(words)
    assert max(words.get_vocab().values()) == len(words) - 1
    for text, each in zip(TEXTS, ids, strict=True):
        stream = Detokenizer(words)
        assert "".join(map(stream.push, each)) + stream.flush() == decode(words, each), text


def test_every_pre_tokenizer_has_its_own_ids() -> None:
    golden = json.loads(GOLDEN.read_text())
    assert set(golden) == set(NAMES)
    rules = {SPLITS[pre] for pre in SPLITS if SPLITS[pre].by_bytes}
    digests = {golden[pre] for pre in SPLITS if SPLITS[pre].by_bytes}
    assert len(digests) == len(rules), "two rules give the same ids: the texts do not show how they differ"


def spelled(path: Path, text: str) -> list[str | None]:
    words = gguf_tokenizer.plain(path)
    return [words.convert_ids_to_tokens(id) for id in words.encode(text)]


def test_spaces_and_special_tokens_of_a_sentencepiece_vocabulary(tmp_path: Path) -> None:
    path = pieces(tmp_path / "a.gguf")
    assert spelled(path, "") == ["<s>"]
    assert spelled(path, " ") == ["<s>", "▁▁"]
    assert spelled(path, "<s> the<|end|>\nthe") == ["<s>", "<s>", "▁▁", "the", "<|end|>", "▁\n", "the"]
    assert spelled(path, "🦙") == ["<s>", "▁", "<0xF0>", "<0x9F>", "<0xA6>", "<0x99>"]
    assert spelled(pieces(tmp_path / "b.gguf", add_space_prefix=False), " the") == ["<s>", "▁the"]
    stripped = ["<s>", "<|end|>", "▁the", "<tool>", "▁the", "<s>", "▁▁", "the"]
    assert spelled(pieces(tmp_path / "c.gguf", name="Phi-3"), "<|end|> \n\tthe<tool> the<s> the") == stripped


def test_tokens_that_texts_hold_whole(tmp_path: Path) -> None:
    words = gguf_tokenizer.plain(byte_level(tmp_path / "a.gguf", "qwen2"))
    # <|im_end|> is a normal token in the file, and known by its text
    assert words.decode(words.encode("<|im_start|>a<tool><|im_end|>ø<s>"), skip_special_tokens=True) == "a<tool>ø"
    words.backend_tokenizer.encode_special_tokens = True
    assert [id for id in words.encode("<s><tool>") if id < len(SPECIAL)] == [9]


def test_a_user_defined_letter_is_text_and_no_byte(tmp_path: Path) -> None:
    words = gguf_tokenizer.plain(byte_level(tmp_path / "a.gguf", "deepseek-llm"))
    ids = words.encode("øre, schøøn ø")
    stream = Detokenizer(words)
    assert decode(words, ids) == "".join(map(stream.push, ids)) + stream.flush() == "øre, schøøn ø"


def test_harmony_shows_its_channels(tmp_path: Path) -> None:
    names = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
    typed = [
        *((name, CONTROL) for name in names),
        *((letter, NORMAL) for letter in pre_tokenizers.ByteLevel.alphabet()),
    ]
    words = gguf_tokenizer.plain(write(tmp_path / "a.gguf", "gpt2", typed, ["a b"], pre="gpt-4o"))
    assert decode(words, range(6)) == "<|start|><|channel|><|message|><|end|>"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown pre-tokenizer": ({"pre": "of-tomorrow"}, "tokenizer.ggml.pre is 'of-tomorrow'"),
    "one that is not expressed": ({"pre": "mmbert"}, "tokenizer.ggml.pre is 'mmbert'"),
    "another kind": ({"kind": "bert"}, "tokenizer.ggml.model is 'bert'; known are llama, gpt2, gemma4, t5"),
    "a token twice": ({"typed": [("a", 1), ("b", 1), ("a", 1)]}, "tokens holds a twice"),
    "BOS that nothing names": ({"add_bos_token": True}, "add_bos_token is true, and bos_token_id names no token"),
    "types of too few": ({"token_type": [1, 1]}, "token_type has 2 items for 3 tokens"),
    "types of texts": ({"token_type": ["1", "1", "1"]}, "token_type is no list of numbers"),
    "merges of numbers": ({"merges": [1, 2]}, "merges is no list of texts"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_llama_cpp_does_not_read_is_refused_by_name(name: str, tmp_path: Path) -> None:
    told, why = REFUSED[name]
    typed = [("a", NORMAL), ("b", NORMAL), ("ab", NORMAL)]
    path = write(tmp_path / "a.gguf", **{"kind": "gpt2", "typed": typed, "merges": ["a b"], **told})
    for read in (gguf_tokenizer.plain, lambda path: find(str(path)), lambda path: LoneTokenizer(str(path))):
        with pytest.raises(ModelError, match=r"a\.gguf") as refused:
            read(path)
        assert why in str(refused.value)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of memory is read there")
def test_scores_take_little_memory(tmp_path: Path) -> None:
    """1.1 MB of tokens a, aa, aaa ... would be a million merges of a thousand letters."""
    typed = [("<unk>", UNKNOWN), *(("a" * size, NORMAL) for size in range(1, 1450))]
    path = write(tmp_path / "a.gguf", "llama", typed, scores=[-float(id) for id in range(len(typed))], bos_token_id=0)
    code = (
        "import pathlib, re, sys\nfrom genctl.models import gguf_tokenizer\n"
        "words = gguf_tokenizer.plain(pathlib.Path(sys.argv[1]))\n"
        "assert len(words.encode('a' * 5000)) < 100\n"
        "print(re.search(r'VmHWM:\\s*(\\d+) kB', open('/proc/self/status').read())[1])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 150_000  # KiB


def test_prompts_for_a_server_can_have_the_ids_of_a_gguf_file(tmp_path: Path) -> None:
    lone, text = LoneTokenizer(str(pieces(tmp_path / "words.gguf"))), "the cat <tool>"
    assert lone.ids(text) == gguf_tokenizer.plain(tmp_path / "words.gguf").encode(text)


def test_files_beside_it_and_the_runtime_change_nothing(tmp_path: Path) -> None:
    from tests.models.test_gguf import written as model

    path = model(tmp_path / "tiny.gguf")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "T5Tokenizer"}')
    texts = ("the cat  sat", "<eos>12 naïve")
    ids = [gguf_tokenizer.plain(path).encode(text) for text in texts]
    for runtime in ("native", "transformers"):
        quantize = "gguf" if runtime == "native" else None
        words = load(Runtime(model=str(path), runtime=runtime, quantize=quantize)).tokenizer
        assert isinstance(words, PlainTokenizer)
        assert [words.encode(text) for text in texts] == ids
    assert ids[0] == tokenizer()(texts[0])["input_ids"]


# -- beside the program itself -----------------------------------------------------------------------------------------


def tokenized(path: Path, text: str, *flags: str) -> list[int]:
    """What llama-tokenize prints."""
    program = next(Path(str(LLAMA_CPP)).rglob("bin/llama-tokenize"))
    command = [str(program), "-m", str(path), "--stdin", "--ids", "--no-escape", "--log-disable", *flags]
    done = subprocess.run(command, input=text.encode(), capture_output=True, check=True)
    return list(ast.literal_eval(done.stdout.decode()))


REAL = sorted(Path(LLAMA_CPP).rglob("ggml-vocab-*.gguf")) if LLAMA_CPP else []


@pytest.mark.skipif(not REAL, reason="GENCTL_LLAMA_CPP names no folder of llama.cpp with its source and its programs")
@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem.removeprefix("ggml-vocab-"))
def test_ids_of_real_vocabularies(path: Path) -> None:
    if "bert-bge" in path.name:  # WordPiece
        with pytest.raises(ModelError, match="model is 'bert'"):
            gguf_tokenizer.plain(path)
        return
    words, listed = gguf_tokenizer.plain(path), Path(f"{path}.inp")
    texts = [*TEXTS]
    if listed.is_file():
        lines = Path(f"{path}.out").read_text().splitlines()
        own = listed.read_bytes().decode().split("\n__ggml_vocab_test__\n")[: len(lines)]
        expected = [[int(id) for id in line.split()] for line in lines]
        assert [words.encode(text, add_special_tokens=False) for text in own] == expected
        texts += own
    unigram = words.backend_tokenizer.model.__class__.__name__ == "Unigram"
    if unigram:  # the library normalizes marks otherwise, and finds control tokens among the pieces of a text
        texts = [text for text in texts if text.isascii()]
    for joint in ("".join(texts), "\n".join(texts)):
        assert words.encode(joint) == tokenized(path, joint)
        assert words.encode(joint, add_special_tokens=False) == tokenized(path, joint, "--no-bos")
        words.backend_tokenizer.encode_special_tokens = True
        assert unigram or words.encode(joint) == tokenized(path, joint, "--no-parse-special")
        words.backend_tokenizer.encode_special_tokens = False


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: made(name, Path(folder) / f"{at}.gguf") for at, name in enumerate(NAMES)}
        found = {name: digest([tokenized(path, text) for text in TEXTS]) for name, path in paths.items()}
    json.dump(found, sys.stdout, indent=0)
