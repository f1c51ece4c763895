"""Turn messages into a prompt with the checkpoint's chat template, which is untrusted code.

Templates are rendered in jinja's immutable sandbox: no attribute reaches Python's internals, nothing is written. The
sandbox limits neither time nor memory, so one separate process (`chat_worker`) renders all prompts of a run, and is
killed if a prompt takes more than `SECONDS`. The result equals that of
`apply_chat_template(add_generation_prompt=True)`, except for null content, which transformers leaves out.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from genctl.errors import InputError, ModelError, quote
from genctl.models.libraries import brief

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SECONDS = 5.0  # for one prompt; real templates need milliseconds
_STARTING = 120.0  # for importing jinja on a slow disk
_HERE = "CONTINUE_FINAL_MESSAGE_TAG "  # marks the end of a message in the rendered text, as in transformers
# Isolated, so that Python files of the current folder are not imported.
_WORKER = "import sys; sys.path[:] = sys.argv[1:]; from genctl.models.chat_worker import main; main()"
# Variables that a process needs to start. All others are removed: any of them may hold a secret.
_PASSED = ("PATH", "LANG", "LANGUAGE", "TZ", "TZDIR", "TMPDIR", "TEMP", "TMP", "SYSTEMROOT", "LD_LIBRARY_PATH")
_PASSED_PREFIXES = ("LC_", "DYLD_")


def render_chat_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    *,
    system: str | None = None,
    name: str = "",
    continues: bool = False,
    variables: Mapping[str, Any] | None = None,
    template: str | None = None,
) -> str:
    """The text of a conversation, special tokens included. `system` goes first; `name` is the checkpoint's.

    With `continues` it ends within the last message, to be continued, like `continue_final_message` of transformers.
    `variables` are further variables for the template; `template` is the name of one of several templates.

    Raises InputError for malformed messages, ModelError without a template or if it fails, loops or writes too much.
    """
    conversation = check_messages(messages, system)
    source = check_template(tokenizer, name, template, tools=bool((variables or {}).get("tools")))
    # null counts as missing, as in transformers, but templates distinguish null content (beside tool_calls) from none
    fields = [
        {key: value for key, value in one.items() if value is not None or key == "content"} for one in conversation
    ]
    special = {
        key: list(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        for key, value in tokenizer.special_tokens_map.items()
    }
    request: dict[str, Any] = {"template": source, "messages": fields, "special": special}
    request["variables"] = dict(variables or {})
    if not continues:
        return _RENDERER.render(request)
    last = fields[-1].get("content")
    if not isinstance(last, str):
        raise InputError("the last message has no text that could be continued")
    fields[-1]["content"] = last + _HERE
    request["variables"]["add_generation_prompt"] = False
    before, mark, after = _RENDERER.render(request).rpartition(_HERE.strip())
    if not mark or not before.rstrip().endswith(last.strip()):
        raise ModelError("the chat template leaves out the last message, so it cannot be continued")
    return before if after.startswith(" ") else before.rstrip()  # a template may strip trailing blanks


def render_prefilled(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], prefill: str, **how: Any
) -> str:
    """The text of a conversation with the beginning of its answer, which the template renders as unfinished.

    If the template changes such an answer (it removes a thought), the beginning follows the generation prompt.
    `how` goes to `render_chat_text`. Raises as it does.
    """
    try:
        answer = {"role": "assistant", "content": prefill}
        return render_chat_text(tokenizer, [*messages, answer], **how, continues=True)
    except ModelError:
        return render_chat_text(tokenizer, messages, **how) + prefill


def after_messages(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], rendered: str, **how: Any
) -> str:
    """The end of a rendered prompt that the template adds after all messages: the answer begins with it.

    It is what the template adds for `add_generation_prompt`; if that changes nothing, what follows a mark at the end
    of the last message. "" if neither can be found. `how` goes to `render_chat_text`.
    """
    plain = {**how, "variables": {**(how.get("variables") or {}), "add_generation_prompt": False}}
    with suppress(ModelError):
        before = render_chat_text(tokenizer, messages, **plain)
        if before not in (rendered, "") and rendered.startswith(before):
            return rendered[len(before) :]
    with suppress(ModelError):
        whole = render_chat_text(tokenizer, messages, **how)
        after = render_chat_text(tokenizer, [*messages[:-1], _marked(messages[-1])], **how).rpartition(_HERE.strip())[2]
        before = whole.removesuffix(after)
        if before != whole and rendered.startswith(before):
            return rendered[len(before) :]
    return ""


def _marked(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose text ends with a mark."""
    content = message.get("content")
    if isinstance(content, list):
        return {**message, "content": [*content, {"type": "text", "text": _HERE.strip()}]}
    return {**message, "content": f"{content or ''}{_HERE.strip()}"}


def check_template(
    tokenizer: PreTrainedTokenizerBase, name: str = "", chosen: str | None = None, *, tools: bool = False
) -> str:
    """The checkpoint's chat template; of several the one named `chosen`, or that for `tools` as in transformers.

    Raises ModelError if it has none.
    """
    several = getattr(tokenizer, "chat_template", None)
    named = several if isinstance(several, dict) else {"default": several} if several else {}
    whose = name or getattr(tokenizer, "name_or_path", "") or "the checkpoint"
    wanted = chosen or ("tool_use" if tools and "tool_use" in named else "default")
    if wanted in named:
        return str(named[wanted])
    if not named:
        hint = "use the prompt as it is (without --chat), or a checkpoint that was tuned for chat"
        raise ModelError(f"{whose} has no chat template", hint=hint)
    hint = f"chat_template can be {', '.join(sorted(named))}"
    raise ModelError(f"{whose} has no chat template named {quote(wanted)}", hint=hint)


def check_messages(messages: Any, system: str | None = None) -> list[dict[str, Any]]:
    """The conversation with its system message, and tool arguments as objects. Raises InputError.

    Rows are checked as they are read (`io.jsonl`); this only checks what would break the code below.
    """
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise InputError('messages must be a list of objects such as {"role": "user", "content": "Hello"}')
    conversation = [
        {**message, "tool_calls": list(map(_with_arguments, calls))}
        if isinstance(calls := message.get("tool_calls"), list)
        else message
        for message in messages
    ]
    if system is None:
        return conversation
    if conversation[0]["role"] == "system":
        raise InputError("the messages begin with a system message, and --system gives another one")
    return [{"role": "system", "content": system}, *conversation]


def _is_message(message: Any) -> bool:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return False
    content = message.get("content")
    parts = isinstance(content, list) and all(isinstance(part, dict) for part in content)
    return isinstance(content, str) or parts or bool(message.get("tool_calls"))


def _with_arguments(call: Any) -> Any:
    """A tool call with its arguments as an object, as templates expect. Raises InputError."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or "name" not in function:
        return call
    arguments = function.get("arguments") or {}
    try:
        read = {**function, "arguments": json.loads(arguments) if isinstance(arguments, str) else arguments}
    except (ValueError, RecursionError):
        raise InputError(f"the arguments of the tool {quote(str(function['name']))} are no JSON object") from None
    return {**call, "function": read} if "function" in call else read


class _Renderer:
    """The worker process: started when first needed, ended with the run or when it does not answer."""

    def __init__(self) -> None:
        self.forget()
        atexit.register(self.close)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.forget)

    def forget(self) -> None:
        """Start without a worker: a forked process must not use its parent's."""
        self.process: subprocess.Popen[bytes] | None = None
        self.lock = threading.Lock()

    def render(self, request: dict[str, Any]) -> str:
        """The rendered text. Raises ModelError with the reason if it fails."""
        line = json.dumps(request).encode() + b"\n"
        with self.lock:
            if self.process is None or self.process.poll() is not None:
                self.close()
                self._start()
            answer = self._exchange(line, SECONDS)
        if answer is None:
            raise ModelError(f"the chat template did not finish in {SECONDS:g} seconds or used too much memory")
        if "error" in answer:
            raise ModelError(f"the chat template failed: {brief(ValueError(answer['error']))}")
        return str(answer["text"])

    def close(self) -> None:
        """End the worker."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _start(self) -> None:
        environment = {
            key: value for key, value in os.environ.items() if key in _PASSED or key.startswith(_PASSED_PREFIXES)
        }
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-c", _WORKER, *filter(None, sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # genctl handles Ctrl-C itself
        )
        if self._exchange(b"", _STARTING) is None:
            raise ModelError("the process that renders chat templates could not be started")

    def _exchange(self, line: bytes, seconds: float) -> dict[str, Any] | None:
        """Send a request and read the answer; if it does not come in time, kill the worker and return None."""
        process: Any = self.process
        alarm = threading.Timer(seconds, process.kill)
        alarm.daemon = True
        alarm.start()
        reply = b""
        try:
            with suppress(OSError):
                process.stdin.write(line)
                process.stdin.flush()
                reply = process.stdout.readline()
        except BaseException:  # an interrupted exchange cannot be continued
            self.close()
            raise
        finally:
            alarm.cancel()
        if not reply.endswith(b"\n"):
            self.close()
            return None
        answer: dict[str, Any] = json.loads(reply)
        return answer


_RENDERER = _Renderer()
close = _RENDERER.close  # ends the process that renders templates; it starts again when needed
