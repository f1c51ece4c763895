"""Hostile presets and JSONL lines, made from a random number: what people slip on, and what attackers try.

Each begins as something sound (a knob with a value that fits) and is then spoilt in one to four ways. Equal numbers
give equal bytes on every machine.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any

from genctl import params
from genctl.config.toml import write_key, write_value

MEBIBYTE = 1 << 20

# What a text may do to whoever prints it, parses it or compares it.
TEXTS = (
    "", " ", "\n", "\t", "\r", "a\nerror: all is well", "\x00", "\x1b]0;title\x07", "\x1b]52;c;ZXZpbA==\x07",
    "\x1b]8;;http://evil\x1b\\link", "\x1b[2J\x1b[H", "\x9b31m", "[bold red]markup[/]", "<script>alert(1)</script>",
    "\u202egnp.exe", "\u2066\u2069", "\u2028", "\ufeff", "é" * 40, "𝔘𝔫𝔦", "../../../../etc/passwd", "/dev/zero",
    "/proc/self/environ", "~nobody-at-all/x", "builtin:../../x", "https://user:hf_0123456789abcdefghij@host/x",
    "${HOME}", "%s%n{0}", "os:system", "true", "null", "nan", "1e999", "(a+)+$", "((((", "[a-", "a{99999}",
    "\\p{Nope}", "start: start", 'start: "a', '{"type": "object"', '{"$ref": "#"}', '{"type": 7}',
)  # fmt: skip

# TOML values of every sort, sound and not.
VALUES = (
    "0", "-1", "1", "2", "65537", "2147483648", "9223372036854775807", "9223372036854775808",
    "18446744073709551616", "1" + "0" * 60, "9" * 5000, "0x7fffffffffffffff", "0b" + "1" * 70, "1_000", "1__0",
    "+1", "01", "0.0", "-0.0", "0.5", "1.0000001", "1e308", "1e309", "-1e308", "5e-324", "1e-400", "nan", "-nan",
    "inf", "-inf", "+inf", "true", "false", "True", "yes", "null", "None", "[]", "{}", "[[]]", "[1, 2, 3]",
    "[1, true]", "[1, [2, [3]]]", '["a", 1]', "[nan]", "[-1]", "[[1, 2], 3.5]", "[[[1], 2.0]]", "[[[1], nan]]",
    "{a = 1}", "{a = nan}", '{" a" = 2.0, "#5" = -inf}', '{"#99999999999999999999" = 1}',
    "{a = {b = {c = [1, 2, {d = 3}]}}}", "{ngram_len = 5, keys = [1, 2]}",
    '{type = "object", properties = {a = {type = "nope"}}}', "1979-05-27", "1979-05-27T07:32:00Z", "07:32:00",
    "[1979-05-27]", "{when = 1979-05-27}", "''''''", '"""\na\n"""', "'''\\x'''", '"\\u0000"', '"\\u001b[31m"',
    '"\\U0010ffff"', '"\\ud800"', '"\\q"', '"unterminated', "", "=", "#", "0o777", "1e5", "0x", "1.", ".5",
)  # fmt: skip

TABLES = (
    '[[processors]]\nuse = "top_k"\ntop_k = 5', '[[processors]]\nuse = "top_k"\ntop_p = 5',
    '[[processors]]\nuse = "os:system"\ncommand = "true"', "[[processors]]\nuse = 5", "[[processors]]",
    '[[stopping]]\nuse = "stop_strings"\nstop_strings = ["a"]', '[[stopping]]\nuse = "subprocess:Popen"',
    '[processors]\nuse = "top_k"', "[model]\nname = 1", "[tool.genctl]\ntop_k = 5", "processors = []",
    'processors = ["top_k"]', "stopping = [{use = 'nothing'}]", 'extends = "job.toml"', 'extends = "../job.toml"',
    'extends = ["greedy", "greedy"]', 'extends = "/etc/passwd"', 'extends = "a\\u0000b.toml"', 'extends = ""',
    "extends = 3", 'preset = "greedy"', "about = 1", 'about = "a\\nb"', "trust_remote_code = true",
    "allow_pickle = true", "allow_plugins = true", "do_sample = true", "a.b.c = 1\na.b = 2", '"" = 1', "'' = 1",
    '"top_k" = 5\ntop_k = 5', "top_k = 1 top_p = 1",
)  # fmt: skip


@cache
def knobs() -> tuple[str, ...]:
    """The name of every knob."""
    return (*params.knobs(params.Generation), *params.knobs(params.Runtime))


@cache
def sound() -> tuple[tuple[str, Any], ...]:
    """Knobs with values that fit: the built-in ones, and one more of their kind."""
    found: list[tuple[str, Any]] = []
    for kind in (params.Generation, params.Runtime):
        for name in params.knobs(kind):
            value = getattr(kind(), name)
            if value is not None:
                found.append((name, value))
            if isinstance(value, bool):
                found.append((name, not value))
    found += [
        ("max_new_tokens", 7),
        ("max_new_tokens", 3),
        ("seed", 5),
        ("stop_strings", ["a", "b"]),
        ("stop_regex", "a+b"),
        ("regex", "[a-z]+"),
        ("json_schema", {"type": "object"}),
        ("grammar", 'start: "a"+'),
        ("bad_words", ["x"]),
        ("logit_bias", {" a": 1.5, "#7": -2.0}),
        ("num_beams", 3),
        ("repetition_penalty", 1.3),
        ("no_repeat_ngram_size", 2),
        ("prompt_lookup_num_tokens", 3),
        ("guidance_scale", 1.5),
        ("prefix", "a"),
        ("eos_token_id", [2, 3]),
        ("suppress_tokens", [4]),
        ("dry_multiplier", 0.8),
        ("top_k", 4),
    ]
    return tuple(found)


def preset(random: Random) -> bytes:
    """The bytes of one hostile preset."""
    lines = [_assignment(random) for _ in range(random.choice((1, 1, 1, 2, 3, 6)))]
    if random.random() < 0.2:
        lines.insert(random.randrange(len(lines) + 1), random.choice(TABLES))
    if random.random() < 0.04:
        lines.append(_bomb(random))
    data = random.choice(("\n", "\n", "\n", "\r\n")).join([*lines, ""]).encode("utf-8", "surrogatepass")
    return spoilt(random, data) if random.random() < 0.4 else data


def line(random: Random) -> bytes:
    """One hostile line of a JSONL input, without its line end."""
    row: dict[str, Any] = {}
    for _ in range(random.choice((1, 1, 2, 3))):
        key = random.choice((*_ROW_KEYS, "prompt", "prompt", "params", "params", "params"))
        row[key if random.random() < 0.95 else near_miss(random, key)] = _row_value(random, key)
    text = json.dumps(row, ensure_ascii=random.random() < 0.5)
    if random.random() < 0.25:
        text = random.choice(_TEXT_SPOILERS)(random, text)
    data = text.encode("utf-8", "surrogatepass").replace(b"\n", b" ")
    return spoilt(random, data).replace(b"\n", b" ") if random.random() < 0.3 else data


def spoilt(random: Random, data: bytes) -> bytes:
    """`data` with one to four faults on the level of bytes."""
    for _ in range(random.choice((1, 1, 2, 4))):
        data = random.choice(_BYTE_SPOILERS)(random, data)
    return data


def near_miss(random: Random, name: str) -> str:
    """A name that somebody might type instead."""
    place = random.randrange(len(name))
    return random.choice(
        (
            lambda: name[:place] + name[place + 1 :],
            lambda: name[:place] + name[place] + name[place:],
            lambda: name[:place] + random.choice("abcxyz_-. \u0435\u202e\x1b\x00") + name[place + 1 :],
            lambda: name.replace("_", "-"),
            lambda: name.upper(),
            lambda: f"{name} ",
            lambda: f"generation.{name}",
            lambda: name * 40,
        )
    )()


def _assignment(random: Random) -> str:
    choice = random.random()
    name = random.choice(knobs())
    if choice < 0.5:
        known, value = random.choice(sound())
        return f"{known} = {write_value(value)}"
    if choice < 0.65:
        return f"{write_key(near_miss(random, name))} = {random.choice(VALUES)}"
    if choice < 0.8:
        return f"{name} = {write_value(random.choice(TEXTS))}"
    if choice < 0.82:
        return f"{write_key(random.choice(TEXTS))} = 1"
    return f"{name} = {random.choice(VALUES)}"


def _bomb(random: Random) -> str:
    size = random.choice((100, 2000, 30_000))
    return random.choice(
        (
            lambda: "a." * size + "a = 1",
            lambda: "a = " + "[" * size,
            lambda: "a = " + "[" * size + "]" * size,
            lambda: "a = " + "{a = " * size + "1" + "}" * size,
            lambda: "\n".join(f"k{n} = {n}" for n in range(size)),
            lambda: "\n".join(f"[t{n}.a.b]" for n in range(size // 10)),
            lambda: f'about = "{"x" * size}"',
            lambda: f"top_k = {'9' * size}",
            lambda: "\n" * size + "top_k = -1",
            lambda: "#" * size,
            lambda: f"stop_strings = [{', '.join(['1'] * size)}]",
            lambda: '[[processors]]\nuse = "top_k"\n' * (size // 10),
            lambda: f'regex = "{"(" * size}"',
            lambda: f'about = "{"x" * MEBIBYTE}"',
            lambda: f'model = "{"x" * (MEBIBYTE - 100)}"',
        )
    )()


_ROW_KEYS = (
    "id", "prompt", "prompt_ids", "messages", "params", "reference", "prefix", "system", "negative_prompt",
)  # fmt: skip
_JSON: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**63, 10**60, 0.5, 1e308, 5e-324, float("nan"), float("inf"), [], {}, [[]],
    [1, 2, 3], [-1], [2**63], [True], [1.5], ["a", 1], {"a": 1}, {"": {"": {}}}, {"a": float("nan")},
    [{"role": "user", "content": "hi"}], [{"role": "user"}], [{"role": 3, "content": None}],
    [{"role": "user", "content": "hi", "tool_calls": []}], [{"role": "\x1b[31m", "content": "\ud800"}],
)  # fmt: skip


def _row_value(random: Random, key: str) -> Any:
    choice = random.random()
    if key == "params" and choice < 0.85:
        keys = (*knobs(), "processors", "stopping", "about", "extends", "preset")
        names = random.sample(keys, random.choice((1, 1, 2, 5)))
        return {name if random.random() < 0.8 else near_miss(random, name): _param(random) for name in names}
    if choice < 0.35:
        messages = [{"role": "user", "content": "hi"}]
        return {"prompt": "once", "prompt_ids": [1, 2], "messages": messages, "id": "a"}.get(key, "text")
    return random.choice(_JSON) if choice < 0.65 else random.choice((*TEXTS, "\ud800", "a\udc80"))


def _param(random: Random) -> Any:
    choice = random.random()
    if choice < 0.3:
        return random.choice(sound())[1]
    if choice < 0.6:
        return random.choice(TEXTS)
    if choice < 0.7:
        return [{"use": random.choice(("top_k", "eos", "os:system", "", "\x1b")), random.choice(("top_k", "x")): 1}]
    return random.choice(_JSON)


_BYTE_SPOILERS: tuple[Callable[[Random, bytes], bytes], ...] = (
    lambda random, data: _put(random, data, bytes([random.randrange(256)]), over=1),
    lambda random, data: _put(random, data, bytes([random.randrange(256)])),
    lambda random, data: _put(random, data, random.choice((b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\xed\xa0\x80"))),
    lambda random, data: _put(random, data, random.choice((b"\xc0\xaf", b"\xf4\x90\x80\x80", b"\x80", b"\r", b"\x0c"))),
    lambda random, data: _put(
        random, data, random.choice((b"\xe2\x80\xae", b"\xc2\x85", b"\xe2\x80\xa8", b"\x1b[31m"))
    ),
    lambda random, data: data[: random.randrange(len(data) + 1)],
    lambda random, data: data[random.randrange(len(data) + 1) :],
    lambda random, data: data * 2,
    lambda random, data: b"\xef\xbb\xbf" + data,
    lambda random, data: data.decode("utf-8", "replace").encode("utf-16"),
    lambda random, data: _put(random, data, bytes([random.choice(b"[]{}\"'=,\\#.")])),
    lambda random, data: _put(random, data, random.randbytes(8)),
)

_NO_NUMBERS = ("NaN", "-Infinity", "1e999", "01", "+1", ".5", "\\u0000")

_TEXT_SPOILERS: tuple[Callable[[Random, str], str], ...] = (
    lambda random, text: text[:-1] + ', "prompt": "again"}',
    lambda random, text: text.replace("1", "9" * 5000, 1),
    lambda random, text: '{"params": ' + '{"a": ' * 3000 + "1" + "}" * 3001,
    lambda random, text: '{"params": {"bad_words_ids": ' + "[" * 200 + "]" * 200 + "}, " + text[1:],
    lambda random, text: "[" * random.choice((50, 5000)),
    lambda random, text: "[" + text + "]",
    lambda random, text: text + text,
    lambda random, text: text + ",",
    lambda random, text: text.replace('"', "'"),
    lambda random, text: text[:-1] + ', "x": ' + random.choice(_NO_NUMBERS) + "}",
    lambda random, text: text[:-1] + ', "' + "k" * random.choice((100, MEBIBYTE)) + '": 1}',
    lambda random, text: '{"prompt": "' + "x" * random.choice((1000, MEBIBYTE)) + '", ' + text[1:],
    lambda random, text: "\ufeff" + text,
)


def _put(random: Random, data: bytes, piece: bytes, *, over: int = 0) -> bytes:
    at = random.randrange(len(data) + 1)
    return data[:at] + piece + data[at + over :]
