"""The backend of lm-evaluation-harness: the numbers of its own hf backend, resumed runs, and refusals.

Skipped where lm_eval is not installed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from genctl import process
from genctl.errors import GenctlError, UsageError
from tests.lm_eval import tasks
from tests.models.test_gguf import written
from tests.planted import script
from tests.tiny import tiny

lm_eval = pytest.importorskip("lm_eval", reason="lm_eval is not installed: genctl[lm-eval]")
pytestmark = pytest.mark.filterwarnings("ignore")  # those of lm_eval and datasets

STORIES = str(Path(__file__).parents[2] / "genctl" / "models" / "builtin" / "stories")
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CLOSE = 1e-5  # nats, or this part of a sum


@pytest.fixture(autouse=True, scope="module")
def undescribed_machine() -> Iterator[None]:
    """lm_eval describes the machine beside its results. No test reads that, and it starts pip and others each time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tasks.write(tmp_path_factory.mktemp("tasks"))


def run(folder: Path, model: str, *names: str, batch_size: int | str = 1, **arguments: Any) -> dict[str, list[Any]]:
    """The responses to each sample of each task."""
    from lm_eval.tasks import TaskManager

    import genctl.lm_eval

    genctl.lm_eval.register()
    use_cache = arguments.pop("use_cache", None)
    gen_kwargs = arguments.pop("gen_kwargs", None)
    chat = {name: arguments.pop(name) for name in ("apply_chat_template", "system_instruction") if name in arguments}
    found = lm_eval.simple_evaluate(
        model=model,
        model_args={"dtype": "float32", **arguments},
        tasks=list(names or tasks.NAMES),
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        batch_size=batch_size,
        device="cpu",
        bootstrap_iters=0,
        use_cache=use_cache,
        gen_kwargs=gen_kwargs,
        **chat,
    )
    return {
        task: [sample["resps"] for sample in sorted(samples, key=lambda sample: sample["doc_id"])]
        for task, samples in found["samples"].items()
    }


@pytest.fixture(scope="module")
def of_stories(folder: Path) -> dict[str, list[Any]]:
    """The responses of the built-in model to all tasks."""
    return run(folder, "genctl", pretrained=STORIES)


def check_equal(found: Any, expected: Any) -> None:
    """Numbers within `CLOSE`, everything else equal."""
    if isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            check_equal(one, other)
    elif isinstance(expected, float):
        assert abs(found - expected) <= CLOSE * max(1.0, abs(expected))
    else:
        assert found == expected


@pytest.fixture(scope="module", params=["stories", "llama", "gpt2", "t5"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    if request.param == "stories":
        return STORIES
    place = tmp_path_factory.mktemp(request.param)
    tiny(request.param, place)
    return str(place)


def test_every_sample_has_the_numbers_of_hf_at_any_batch_size(folder: Path, checkpoint: str) -> None:
    expected = run(folder, "hf", batch_size=3, pretrained=checkpoint)
    assert {task: len(rows) for task, rows in expected.items()} == dict(zip(tasks.NAMES, (8, 5, 6), strict=True))
    for batch_size, runtime in ((1, "native"), (5, "native"), ("auto", "transformers")):
        found = run(folder, "genctl", batch_size=batch_size, pretrained=checkpoint, runtime=runtime)
        for task in tasks.NAMES[:2]:
            check_equal(found[task], expected[task])
        if "t5" not in Path(checkpoint).name:
            check_equal(found["own_answers"], expected["own_answers"])
            continue
        # hf counts the source of an encoder-decoder as a part of the answer, whose length so depends on the batch
        for ((mine,),), ((theirs,),) in zip(found["own_answers"], expected["own_answers"], strict=True):
            assert theirs.startswith(mine)
            assert mine


@pytest.mark.parametrize("arguments", [{"max_length": 24}, {"add_bos_token": True}, {"prefix_token_id": 9}], ids=str)
def test_arguments_mean_what_they_mean_in_hf(folder: Path, arguments: dict[str, Any]) -> None:
    names = tasks.NAMES[: 2 if "max_length" in arguments else 3]
    expected = run(folder, "hf", *names, pretrained=STORIES, **arguments)
    found = run(folder, "genctl", *names, batch_size=4, pretrained=STORIES, **arguments)
    for task in names:
        check_equal(found[task], expected[task])


def test_rounded_weights_and_gguf_at_any_batch_size(
    folder: Path, of_stories: dict[str, list[Any]], tmp_path: Path
) -> None:
    rounded = run(folder, "genctl", pretrained=STORIES, quantize="int4")
    assert rounded["own_choices"] != of_stories["own_choices"]
    together = run(folder, "genctl", batch_size=8, pretrained=STORIES, quantize="int4")
    check_equal([together[task] for task in tasks.NAMES], [rounded[task] for task in tasks.NAMES])
    pytest.importorskip("gguf")
    written(tmp_path / "tiny.gguf")
    alone = run(folder, "genctl", "own_texts", pretrained=str(tmp_path / "tiny.gguf"))
    check_equal(run(folder, "genctl", "own_texts", pretrained=str(tmp_path), gguf_file="tiny.gguf"), alone)


@pytest.mark.parametrize("runtime", ["native", "transformers"])
def test_conversations_have_the_numbers_of_hf(runtime: str, folder: Path, tmp_path: Path) -> None:
    names = [tasks.NAMES[0], tasks.NAMES[2]]
    tiny("llama", tmp_path)
    (tmp_path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    chat = {"apply_chat_template": True, "system_instruction": "Answer with one word."}
    expected = run(folder, "hf", *names, pretrained=str(tmp_path), **chat)
    found = run(folder, "genctl", *names, batch_size=4, pretrained=str(tmp_path), runtime=runtime, **chat)
    plain = run(folder, "genctl", *names, pretrained=str(tmp_path), runtime=runtime)
    for task in names:
        check_equal(found[task], expected[task])
        assert found[task] != plain[task]


def test_a_gguf_file_has_the_numbers_of_hf(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    written(tmp_path / "tiny.gguf")
    files = {"pretrained": str(tmp_path), "gguf_file": "tiny.gguf"}
    expected = run(folder, "hf", batch_size=2, **files)
    for batch_size in (1, 4):
        found = run(folder, "genctl", batch_size=batch_size, dequantize=True, **files)
        check_equal([found[task] for task in tasks.NAMES], [expected[task] for task in tasks.NAMES])


def test_a_run_that_was_killed_continues_from_the_cache_of_requests(
    folder: Path, of_stories: dict[str, list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from genctl.lm_eval.model import GenctlLM

    answered: list[Any] = []
    answer, scored = GenctlLM._answer, GenctlLM._scored

    def dies(self: Any, *given: Any) -> str:
        answered.append(given)
        if len(answered) == 4:
            raise KeyboardInterrupt
        return answer(self, *given)

    monkeypatch.setattr(GenctlLM, "_answer", dies)
    cache = str(tmp_path / "requests")
    with pytest.raises(KeyboardInterrupt):
        run(folder, "genctl", pretrained=STORIES, use_cache=cache)
    pieces: list[int] = []

    def counts(self: Any, several: Any) -> Any:
        pieces.append(len(several))
        return scored(self, several)

    monkeypatch.setattr(GenctlLM, "_scored", counts)
    found = run(folder, "genctl", pretrained=STORIES, use_cache=cache)
    assert len(answered) == 4 + 3  # three answers had been kept
    check_equal([found[task] for task in tasks.NAMES], [of_stories[task] for task in tasks.NAMES])
    assert sum(pieces) < len(of_stories["own_choices"]) * 4


def test_settings_of_generation_are_honoured_or_refused(folder: Path) -> None:
    def answers(**settings: Any) -> Any:
        return run(folder, "genctl", "own_answers", pretrained=STORIES, batch_size=4, gen_kwargs=settings)

    drawn = answers(do_sample=True, temperature=1.3, top_p=0.9)
    assert drawn == answers(do_sample=True, temperature=1.3, top_p=0.9)
    assert drawn != answers(do_sample=True, temperature=1.3, top_p=0.9, seed=5)
    short = answers(until=["\n"], max_gen_toks=3)
    assert all(len(text.split()) <= 3 for ((text,),) in short["own_answers"])
    with pytest.raises(UsageError, match="gen_kwargs: genctl has no setting 'top_pp'") as info:
        answers(top_pp=0.9)
    assert info.value.hint == "did you mean top_p?"
    with pytest.raises(UsageError, match="max_gen_toks = 9999 leaves no room for a prompt"):
        answers(max_gen_toks=9999)


@pytest.mark.parametrize(
    ("given", "message", "hint"),
    [
        ({"quantise": "int8"}, "genctl has no argument 'quantise'", "did you mean quantize?"),
        ({"max_lenght": 9}, "genctl has no argument 'max_lenght'", "did you mean max_length?"),
        ({"parallelize": True}, "genctl has no argument 'parallelize'", None),
        ({"temperature": 0.5}, "give --gen_kwargs temperature=0.5 to lm_eval", None),
        ({"batch_size": "many"}, "batch_size = 'many' is neither a number of rows nor auto", None),
        ({"max_length": 0}, "max_length = 0 is not a number of tokens", None),
        ({"max_length": 10**6}, "max_length = 1000000: the context of", None),
        ({"quantize": "int5"}, "quantize", None),
    ],
    ids=str,
)
def test_arguments_that_cannot_be_meant_are_refused(given: dict[str, Any], message: str, hint: str | None) -> None:
    from genctl.lm_eval.model import GenctlLM

    with pytest.raises(GenctlError) as info:
        GenctlLM(STORIES, **given)
    assert message in info.value.message
    assert hint is None or info.value.hint == hint


def test_conversations_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from genctl.lm_eval.model import GenctlLM

    tiny("llama", tmp_path)
    (tmp_path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    model, theirs = GenctlLM(str(tmp_path)), AutoTokenizer.from_pretrained(tmp_path)
    begun = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Well, "}]
    for messages, prompts in ((begun[:1], True), (begun, False), (begun, True)):
        assert model.apply_chat_template(messages, prompts) == theirs.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=prompts, continue_final_message=not prompts
        )
    assert model.chat_template(True) == CHAT_TEMPLATE
    assert model.tokenizer_name == str(tmp_path).replace("/", "__")


def test_the_commands_of_the_guide(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text(encoding="utf-8")
    commands = guide.partition("```sh\n")[2].partition("```")[0]
    _, _, rest = commands.partition("\n")  # it is installed
    environment = {**os.environ, "HF_DATASETS_CACHE": str(tmp_path / "datasets")}
    script(tmp_path / "bin", "genctl.lm_eval.__main__", "genctl-lm-eval")
    environment["PATH"] = (
        f"{tmp_path / 'bin'}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    )
    done = subprocess.run(
        ["bash", "-euc", rest], cwd=tmp_path, capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "|questions|" in done.stdout
    assert [*tmp_path.glob("answered*")]


def test_an_error_on_the_command_line_is_one_line_and_a_hint(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lm_eval.tasks import TaskManager

    from genctl.lm_eval.__main__ import main

    # thousands of tasks of lm_eval, which are read before the model: not those
    monkeypatch.setattr("lm_eval.tasks.TaskManager", partial(TaskManager, include_defaults=False))
    monkeypatch.setenv(process.SAFE, "1")  # is reset afterwards
    given = ["--model_args", "pretrained=builtin:stories,quantise=int8", "--tasks", "own_choices"]
    monkeypatch.setattr(sys, "argv", ["genctl.lm_eval", "--model", "genctl", *given, "--include_path", str(folder)])
    assert main() == 2
    said = capsys.readouterr().err
    assert said.endswith("error: model_args: genctl has no argument 'quantise'\nhint: did you mean quantize?\n")
    assert "Traceback" not in said
