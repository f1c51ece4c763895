"""Texts and values of presets: what people slip on, and what attackers try."""

from __future__ import annotations

from genctl import params

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
    "0", "-1", "1", "2", "65537", "9223372036854775808", "1" + "0" * 60, "9" * 5000, "0b" + "1" * 70, "1__0", "01",
    "-0.0", "0.5", "1e309", "5e-324", "nan", "-inf", "true", "True", "null", "[]", "{}", "[[]]", "[1, true]",
    "[1, [2, [3]]]", '["a", 1]', "[nan]", "[-1]", "[[1, 2], 3.5]", "[[[1], nan]]", "{a = 1}", "{a = nan}",
    '{" a" = 2.0, "#5" = -inf}', '{"#99999999999999999999" = 1}', "{a = {b = {c = [1, 2, {d = 3}]}}}",
    '{type = "object", properties = {a = {type = "nope"}}}', "1979-05-27T07:32:00Z", "[1979-05-27]", "''''''",
    "'''\\x'''", '"\\u0000"', '"\\u001b[31m"', '"\\ud800"', '"\\q"', '"unterminated', "", "=", "#", "1.", ".5",
)  # fmt: skip

TABLES = (
    '[[processors]]\nuse = "top_k"\ntop_p = 5', '[[processors]]\nuse = "os:system"\ncommand = "true"',
    "[[processors]]", '[[stopping]]\nuse = "subprocess:Popen"', '[processors]\nuse = "top_k"', "[model]\nname = 1",
    'processors = ["top_k"]', 'extends = "job.toml"', 'extends = "../job.toml"', 'extends = "a\\u0000b.toml"',
    'about = "a\\nb"', "trust_remote_code = true", "do_sample = true", "a.b.c = 1\na.b = 2", '"" = 1',
    '"top_k" = 5\ntop_k = 5', "top_k = 1 top_p = 1", "a = " + "[" * 30_000, "a." * 30_000 + "a = 1",
    f'about = "{"x" * MEBIBYTE}"',
)  # fmt: skip

KNOBS = (*params.knobs(params.Generation), *params.knobs(params.Runtime))
