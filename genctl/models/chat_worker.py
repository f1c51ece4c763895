"""The process that renders chat templates, so that a hostile one can be ended: started by `chat`.

One JSON object per line on stdin asks, one per line on stdout answers. A template comes with the checkpoint and is
untrusted: transformers renders it in jinja's sandbox, and what the sandbox does not limit (endless loops, texts that
double until memory is gone) is limited here and by the parent's deadline.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

MOST_CHARACTERS = 4_000_000
MOST_MEMORY = 1 << 30  # bytes above what the process needs for itself


def limit_memory() -> None:
    """Give this process a ceiling, where the system can (Linux)."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MOST_MEMORY, used + MOST_MEMORY))


def answer(request: dict[str, Any]) -> dict[str, str]:
    """{"text": …} or {"error": …} for {"template", "messages", "special"}."""
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        rendered, _ = render_jinja_template(
            conversations=[request["messages"]],
            chat_template=request["template"],
            add_generation_prompt=True,
            **request["special"],
        )
    except MemoryError:
        return {"error": "it needs too much memory"}
    except RecursionError:
        return {"error": "it recurses without end"}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:2000]}
    if len(rendered[0]) > MOST_CHARACTERS:
        return {"error": f"it writes {len(rendered[0]):,} characters, more than {MOST_CHARACTERS:,}"}
    return {"text": rendered[0]}


def main() -> None:
    """Answer until stdin ends. What libraries print must not be taken for an answer."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    import transformers.utils.chat_template_utils  # noqa: F401

    answers.write("{}\n")  # ready: the deadline of the first request starts now
    answers.flush()
    limit_memory()
    for line in sys.stdin.buffer:
        answers.write(json.dumps(answer(json.loads(line))) + "\n")
        answers.flush()
