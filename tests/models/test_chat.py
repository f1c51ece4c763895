"""Chat templates: the same text as transformers', and no way to loop, flood or break out."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from genctl.errors import InputError, ModelError
from genctl.models import chat
from genctl.models.text import encode
from tests.tiny import tokenizer
from tests.versions import needs_newest

USER: list[dict[str, Any]] = [{"role": "user", "content": "hello 🦄"}]
CHATML = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}] {{ message['content'] }}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module", autouse=True)
def no_worker_left() -> Iterator[None]:
    yield
    chat.close()


def test_renders_as_transformers_does() -> None:
    made = tokenizer(CHATML)
    messages: list[dict[str, Any]] = [
        *USER,
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": "and?", "name": None},
    ]
    expected = made.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    text = chat.render_chat_text(made, messages)
    assert encode(made, text, add_special_tokens=False) == expected
    assert text == made.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)


CONTINUED = {
    "as it is": CHATML,
    "stripped": "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}{{ eos_token }}{% endfor %}",
    "begun otherwise": "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %}"
    " {{ m.content | trim }}{{ eos_token }}{% endif %}{% endfor %}",
}


@pytest.mark.parametrize("kind", CONTINUED)
@pytest.mark.parametrize("begun", ["Well", " Well, it is ", "is\n", "[assistant]", "a < b & c"])
def test_a_begun_answer_is_rendered_as_with_continue_final_message(kind: str, begun: str) -> None:
    made = tokenizer(CONTINUED[kind])
    messages = [*USER, {"role": "assistant", "content": begun}]
    expected = made.apply_chat_template(messages, continue_final_message=True, tokenize=False)
    assert chat.render_prefilled(made, USER, begun) == expected


@pytest.mark.parametrize(
    "template",
    [
        CHATML.replace("message['content']", "message['content'].split('</t>')[-1]"),  # takes a thought out
        CHATML.replace("{{ bos_token }}", "{% if messages[-1].role != 'user' %}{{ raise_exception('no') }}{% endif %}"),
        "{{ messages[0].content }}[assistant]",
    ],
)
def test_where_a_template_changes_a_begun_answer_it_follows_the_generation_prompt(template: str) -> None:
    made = tokenizer(template)
    text = chat.render_prefilled(made, USER, "<t>Why?</t>")
    assert text == f"{chat.render_chat_text(made, USER)}<t>Why?</t>"
    assert text.endswith("[assistant]<t>Why?</t>")


def test_content_that_is_null_reaches_the_template_as_null() -> None:
    template = "{% for m in messages %}{{ 'content' in m }} {{ m.content is none }} {{ 'name' in m }};{% endfor %}"
    messages = [*USER, {"role": "assistant", "content": None, "name": None, "tool_calls": [{"id": 1}]}, *USER]
    text = chat.render_chat_text(tokenizer(template), messages)
    assert text == "True False False;True True False;True False False;"


def test_the_system_message_comes_first() -> None:
    text = chat.render_chat_text(tokenizer(CHATML), USER, system="be brief")
    assert text == "<bos>[system] be brief<eos>\n[user] hello 🦄<eos>\n[assistant]"


def test_a_checkpoint_without_a_template_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match="gpt2 has no chat template") as caught:
        chat.render_chat_text(tokenizer(), USER, name="gpt2")
    assert "--chat" in caught.value.hint


@pytest.mark.parametrize(
    "messages",
    ["hello", [], ["hello"], [*USER, {"content": "x"}], [{"role": 3, "content": "x"}], [{"role": "user"}],
     [{"role": "user", "content": 7}]],
)  # fmt: skip
def test_malformed_messages_are_refused(messages: Any) -> None:
    with pytest.raises(InputError, match="messages must be a list of objects"):
        chat.render_chat_text(tokenizer(CHATML), messages)


def test_two_system_messages_are_a_contradiction() -> None:
    with pytest.raises(InputError, match="--system gives another one"):
        chat.render_chat_text(tokenizer(CHATML), [{"role": "system", "content": "a"}], system="b")


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.missing.more }}", "UndefinedError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ namespace(_a=1) }}", "SecurityError"),
        ("{{ dict.__class__.mro() }}", "SecurityError|UndefinedError"),
        ("{{ cycler.__init__.__globals__.os.system('true') }}", "SecurityError|UndefinedError"),
        ("{% for i in range(10 ** 9) %}x{% endfor %}", "OverflowError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recurses without end|RecursionError"),
        ("{{ 'x' * 5000000 }}", "writes 5,000,000 characters"),
        ("{{ 'x' * 10 ** 11 }}", "too much memory"),
    ],
)
def test_a_template_that_fails_is_one_line(template: str, said: str) -> None:
    with pytest.raises(ModelError, match=said) as caught:
        chat.render_chat_text(tokenizer(template), USER)
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 400


def test_an_endless_template_is_ended_and_the_next_one_still_renders(monkeypatch: pytest.MonkeyPatch) -> None:
    nested = "{% for a in range(99999) %}" * 4 + "{% endfor %}" * 4
    chat.render_chat_text(tokenizer(CHATML), USER)
    monkeypatch.setattr(chat, "SECONDS", 0.3)
    with pytest.raises(ModelError, match=r"did not finish in 0\.3 seconds"):
        chat.render_chat_text(tokenizer(nested), USER)
    monkeypatch.undo()
    assert chat.render_chat_text(tokenizer(CHATML), USER).endswith("[assistant]")


def test_a_template_sees_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    chat.close()
    secrets = ("HF_TOKEN", "GENCTL_API_KEY", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "HOME")
    for name in secrets:
        monkeypatch.setenv(name, "hf_secret")
    chat.render_chat_text(tokenizer(CHATML), USER)
    process = chat._RENDERER.process
    assert process is not None
    import psutil  # type: ignore[import-untyped]

    assert not {*secrets} & psutil.Process(process.pid).environ().keys()


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% generation %}{{ m.content | upper }}{% endgeneration %}{% endfor %}",
        "{% set n = namespace(seen=0) %}{% for m in messages %}{% set n.seen = n.seen + 1 %}{% endfor %}{{ n.seen }}",
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m | tojson(indent=2) }}{% endfor %}",
        "{{ dict(a=1) | tojson }} {{ tools is none }} {{ documents is none }} {{ strftime_now('%Y')[:2] }}",
        pytest.param(
            "{%- for m in messages %}\n {%- if m.thinking %}<{{ m.reasoning_content }}>{% endif %}\n{% endfor %}",
            marks=needs_newest("give templates the reasoning under one name only"),
        ),
        "{{ {'ü': '<&>'} | tojson }}|{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}",
    ],
)
def test_what_templates_may_use_is_what_transformers_gives_them(template: str) -> None:
    made = tokenizer(template)
    messages = [*USER, {"role": "assistant", "content": "hi", "reasoning": "well"}, {"role": "user", "content": "ok"}]
    expected = made.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert chat.render_chat_text(made, messages) == expected


def test_rendering_imports_no_transformers() -> None:
    code = (
        "import sys; from genctl.models.chat_worker import answer;"
        "told = answer({'template': '{{ messages[0].content }}', 'messages': [{'content': 'x'}], 'special': {}});"
        "sys.exit(str(told) if told != {'text': 'x'} or 'transformers' in sys.modules else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_renders_with_a_worker_of_its_own() -> None:
    made = tokenizer(CHATML)
    text = chat.render_chat_text(made, USER)  # the parent's worker runs
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # not for ever, where it waits for the parent's
        same = chat.render_chat_text(made, USER) == text
        chat.close()
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert chat.render_chat_text(made, USER) == text
