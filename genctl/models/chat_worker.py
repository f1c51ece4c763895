"""The process that renders chat templates for `chat`: a hostile one can be killed.

One JSON object per line on stdin is a request, one per line on stdout the answer. A template is untrusted: it is
rendered in jinja's immutable sandbox, with the functions of transformers' `apply_chat_template`. The sandbox does not
limit endless loops and exponential texts; this file and the parent's deadline do.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

MOST_CHARACTERS = 4_000_000
MOST_MEMORY = 1 << 30  # bytes beyond what the process itself needs


def limit_memory() -> None:
    """Limit the memory of this process, if the system can (Linux)."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MOST_MEMORY, used + MOST_MEMORY))


def answer(request: dict[str, Any]) -> dict[str, str]:
    """{"text": …} or {"error": …} for {"template", "messages", "special"} and optionally {"variables"}."""
    try:
        messages = [_reasoning(message) for message in request["messages"]]
        variables = {"tools": None, "documents": None, "add_generation_prompt": True, **request["special"]}
        variables |= request.get("variables", {})
        rendered = _environment().from_string(request["template"]).render(messages=messages, **variables)
    except MemoryError:
        return {"error": "it needs too much memory"}
    except RecursionError:
        return {"error": "it recurses without end"}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:2000]}
    if len(rendered) > MOST_CHARACTERS:
        return {"error": f"it writes {len(rendered):,} characters, more than {MOST_CHARACTERS:,}"}
    return {"text": rendered}


def _reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """A message with its reasoning under every name that templates use."""
    names = ("reasoning_content", "thinking", "reasoning")
    reasoning = next((message[name] for name in names if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


@cache
def _environment() -> Any:
    """jinja's sandbox, with the filters, functions and tags that transformers gives to chat templates."""
    import jinja2
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(jinja2.ext.Extension):
        """`{% generation %}` marks an assistant's text; the text is unchanged."""

        tags = {"generation"}  # noqa: RUF012 — as jinja declares it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("written"), [], [], body).set_lineno(line)

        def written(self, caller: Any) -> str:
            return str(caller())

    class Dictionary:
        """`dict` without access to its class."""

        def __call__(self, *args: Any, **keywords: Any) -> dict[Any, Any]:
            return dict(*args, **keywords)

        def fromkeys(self, *args: Any) -> dict[Any, Any]:
            return dict.fromkeys(*args)

    class Namespace(jinja2.utils.Namespace):
        """`namespace` without names that begin with an underscore."""

        def __init__(*args: Any, **keywords: Any) -> None:
            self, args = args[0], args[1:]
            attributes = dict(*args, **keywords)
            for name in attributes:
                _allowed(name)
            jinja2.utils.Namespace.__init__(self, attributes)

        def __setitem__(self, name: str, value: Any) -> None:
            _allowed(name)
            jinja2.utils.Namespace.__setitem__(self, name, value)

    def _allowed(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace has no attribute {name!r}")

    def raise_exception(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.globals["dict"] = Dictionary()
    environment.globals["namespace"] = Namespace
    return environment


def main() -> None:
    """Answer until stdin ends. Output of libraries goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    _environment()
    answers.write("{}\n")  # ready: the deadline of the first request starts now
    answers.flush()
    limit_memory()
    for line in sys.stdin.buffer:
        answers.write(json.dumps(answer(json.loads(line))) + "\n")
        answers.flush()
