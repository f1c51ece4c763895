"""Settings for the chat template: its variables, its tools, and which of several templates is used."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from genctl.errors import UsageError
from genctl.params import Runtime

KNOBS = ("chat_template_kwargs", "enable_thinking", "chat_template", "tools")
# variables that have a setting of their own, or that the program sets -> why a table may not set them
RESERVED = {
    "messages": "they are the prompt",
    "add_generation_prompt": "a prompt always ends where the answer begins",
    "tools": "they are the setting tools",
    "chat_template": "it is the setting chat_template",
}


def variables_of(runtime: Runtime) -> dict[str, Any]:
    """The variables that the settings give to a chat template."""
    variables = dict(runtime.chat_template_kwargs or {})
    if runtime.enable_thinking is not None:
        variables["enable_thinking"] = runtime.enable_thinking
    if runtime.tools is not None:
        variables["tools"] = list(runtime.tools)
    return variables


def check_is_chat(runtime: Runtime) -> None:
    """Raises UsageError for settings of the chat template where the prompt is not a chat."""
    idle = [name for name in KNOBS if getattr(runtime, name) is not None]
    if idle and not runtime.is_chat:
        raise UsageError(
            f"{' and '.join(idle)} would change nothing: the prompt is not a chat",
            hint="--chat makes it the message of a user; a row may have messages",
        )


def mistakes(table: Mapping[str, Any], *, thinking: bool) -> list[str]:
    """What is wrong with chat_template_kwargs, one sentence each; `thinking` says that enable_thinking is set too."""
    found = [f"chat_template_kwargs cannot set {name}: {why}" for name, why in RESERVED.items() if name in table]
    if thinking and "enable_thinking" in table:
        found.append("enable_thinking is set alone and in chat_template_kwargs; leave out one of them")
    return found


def unused(template: str, runtime: Runtime) -> list[str]:
    """The variables that a template does not name, so that they change nothing."""
    return [name for name in variables_of(runtime) if re.search(rf"\b{re.escape(name)}\b", template) is None]
