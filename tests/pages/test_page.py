"""A page is a function of the events: nothing of them is lost, nothing in it can become markup, and it stays small."""

from __future__ import annotations

import base64
import hashlib
import json
import math

import pytest

from genctl.events import Failed, Finished
from genctl.pages.page import LARGEST, PageData, filled, script_json
from genctl.pages.search_tree import SCALE
from tests.hostile.corpus import TEXTS
from tests.pages.pages import page_of, parts_of, search, sentence

ELEMENTS = {
    *("html", "head", "meta", "title", "style", "body", "a", "header", "h1", "nav", "main", "section", "h2", "h3", "p"),
    *(
        "code",
        "dl",
        "div",
        "dt",
        "dd",
        "details",
        "summary",
        "pre",
        "noscript",
        "table",
        "caption",
        "thead",
        "tr",
        "th",
    ),
    *("tbody", "td", "script"),
}


def test_equal_events_give_equal_bytes() -> None:
    assert page_of(search(5)) == page_of(search(5))


def test_the_policy_allows_the_script_and_the_style_of_the_page_and_nothing_else() -> None:
    parts = parts_of(search(3))

    def digest(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    (style,), (_, script) = parts.inside["style"], parts.inside["script"]
    allowed = f"style-src {digest(style)}; script-src {digest(script)}"
    assert parts.policy == f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"
    attributes = {name for _, given in parts.elements for name in given}
    assert not {name for name in attributes if name.startswith("on")}
    assert not attributes & {"style", "src"}
    assert "http" not in script.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize(
    "text",
    [*TEXTS, "</script><script>alert(1)</script>", "</script ", "</SCRIPT/", "<!--<script>", "{{ 7 * 7 }}", "\ud800"],
)
def test_nothing_that_a_model_or_a_prompt_says_becomes_markup(text: str) -> None:
    hostile = sentence("0", ["a", text, "b"], prompt=text)
    parts = parts_of(
        [*hostile, Failed("1", text, text)], command=text, job=text, facts=[(text, text)], figures={"0": {text: text}}
    )
    assert {name for name, _ in parts.elements} <= ELEMENTS
    assert len(parts.inside["script"]) == 2
    assert parts.data["lanes"][0]["prompt"] == text
    assert parts.data["lanes"][0]["sequences"][0]["text"] == f"a{text}b"
    assert [1, text] in parts.data["vocabulary"]


def test_no_character_of_the_data_has_a_meaning_in_markup_or_in_a_script() -> None:
    """Browsers end a script at `</script` and any of a blank, `/` and `>`; so not one of these characters is there."""
    text = "</script </script/ <!-- --> & \u2028 \u2029 ]]>"
    page = page_of([*sentence("0", [text], prompt=text), Failed("1", text, text)], figures={"0": {text: text}})
    data = page.split('type="application/json"', 1)[1].split(">", 1)[1].split("</script>", 1)[0]
    assert json.loads(data)["lanes"][0]["prompt"] == text
    for character in "<>&\u2028\u2029":
        assert character not in data
        assert json.loads(script_json({character: [character]})) == {character: [character]}
        assert character not in script_json({character: [character]})


def test_the_tokens_of_a_search_can_be_read_back() -> None:
    events = search(6, beams=3)
    tree = parts_of(events).data["lanes"][0]["tree"]
    nodes = [0]
    depths = {0: 0}
    for number, up in enumerate(tree["up"], 1):
        nodes.append(number - up)
        depths[number] = depths[number - up] + 1
    assert len(tree["up"]) == 6 * 3
    assert max(depths.values()) == 6
    assert len(tree["state"]) == len(tree["token"]) == len(tree["logprob"]) == len(tree["rank"]) == 18
    assert set(tree["top"]) == {str(number) for number in range(1, 19)}
    first = events[1].rows[0]  # type: ignore[union-attr]
    id, text = parts_of(events).data["vocabulary"][tree["token"][0]]
    assert (id, text) == (first.written[0].id, first.written[0].text)
    assert math.isclose(tree["logprob"][0] / SCALE, first.logprob, abs_tol=1 / SCALE)
    assert tree["trace"]["1"][0][:2] == ["top_p", first.written[0].trace[0].removed]


def test_what_penalties_add_to_a_total_is_on_the_page() -> None:
    events = sentence("0", ["a", "b"])
    plain = parts_of(events).data["lanes"][0]["tree"]
    assert "extra" not in plain
    stepped = events[1]
    row = stepped.rows[0]  # type: ignore[union-attr]
    import dataclasses

    events[1] = dataclasses.replace(stepped, rows=(dataclasses.replace(row, total=row.total - 2.0),))  # type: ignore[type-var]
    assert parts_of(events).data["lanes"][0]["tree"]["extra"][:2] == [-2 * SCALE, 2 * SCALE]


def test_ten_thousand_tokens_with_eight_beams_are_under_two_megabytes_and_the_page_says_what_is_left_out() -> None:
    events = search(1250, beams=8)  # ten thousand tokens
    assert len(page_of(events).encode()) < LARGEST
    large = search(4000, beams=8)
    page = page_of(large)
    assert len(page.encode()) < LARGEST == 2_000_000
    assert "To keep this page small, alternatives, ranks" in page
    assert "To keep this page small" not in page_of(search(20))


def test_a_page_of_many_prompts_keeps_all_texts_and_drops_tokens_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("genctl.pages.page.LARGEST", 300_000)
    events = [event for lane in range(200) for event in sentence(str(lane), [f" w{lane}"] * 40)]
    parts = parts_of(events)
    lanes = parts.data["lanes"]
    assert len(lanes) == 200
    assert all(lane["sequences"][0]["text"] for lane in lanes)
    kept = sum("tree" in lane for lane in lanes)
    assert 0 < kept < 200
    assert f"tokens are those of {kept} prompts" in "".join(parts.texts)


def test_prompts_beyond_the_list_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("genctl.pages.page.LISTED", 3)
    parts = parts_of([event for lane in range(5) for event in sentence(str(lane), ["a"])])
    assert len(parts.data["lanes"]) == 3
    assert "2 more prompts are not listed" in "".join(parts.texts)


def test_memory_is_bounded_by_letting_go_of_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("genctl.pages.page.HELD", 10)
    data = PageData()
    for lane in range(4):
        for event in sentence(str(lane), ["a", "b", "c"]):
            data.feed(event)
    assert [lane.has_tokens for lane in data.lanes.values()] == [True, True, False, False]
    assert data.document()["lanes"][3]["sequences"][0]["text"] == "abc"


def test_without_scripts_texts_and_numbers_are_in_the_page() -> None:
    parts = parts_of(
        [*sentence("0", [" an", " owl"], prompt="I saw"), Failed("1", "too-long", "the prompt is too long")]
    )
    text = "".join(parts.texts)
    assert "I saw" in text
    assert " an owl" in text
    assert "too-long: the prompt is too long" in text
    assert "-1.5000" in text  # the log-probability of its three tokens


def test_an_interrupted_run_shows_what_it_came_to() -> None:
    events = search(5, beams=2)[:-2]  # without the last step
    lane = parts_of(events).data["lanes"][0]
    assert [one["reason"] for one in lane["sequences"]] == ["unfinished"] * 2
    assert all(one["tokens"] == 4 and one["text"].count("word") == 4 for one in lane["sequences"])
    assert lane["tree"]["state"].count("v") == 2


def test_numbers_that_are_not_finite_are_null() -> None:
    events = sentence("0", ["a"])
    import dataclasses

    finished = events[-1]
    endless = dataclasses.replace(finished.hypotheses[0], logprob=-math.inf, score=math.nan)  # type: ignore[union-attr]
    events[-1] = Finished("0", (endless,))
    text = json.dumps(parts_of(events).data, allow_nan=False)
    assert parts_of(events).data["lanes"][0]["sequences"][0]["logprob"] is None
    assert "NaN" not in text


def test_lanes_of_a_comparison_stand_side_by_side() -> None:
    one = sentence("greedy/row%201/7", [" a", " b"], strategy="greedy", seed=7)
    two = sentence("a/b/row%201/7", [" a", " c", " d"], seed=7)
    shown = parts_of([*one, *two]).data["comparison"]
    assert shown["runs"] == ["greedy", "a/b"]
    assert shown["base"] == "greedy"
    (prompt,) = shown["prompts"]
    assert (prompt["id"], prompt["lanes"]) == ("row 1", {"greedy": ["greedy/row%201/7"], "a/b": ["a/b/row%201/7"]})
    # token 1 of both texts has id 1; the third differs: the end of the first, " d" in the second
    parting = prompt["partings"]["a/b"]
    assert parting["position"] == 2
    metrics = {one["label"]: one["runs"] for one in shown["metrics"]}
    assert metrics["tokens"]["greedy"][0] == 3.0
    assert metrics["tokens"]["a/b"][0] == 4.0


def test_values_in_a_template_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("genctl.pages.page.file_text", lambda name: "<p>{{ text }}</p>")
    assert filled("any", text="<b>&") == "<p>&lt;b&gt;&amp;</p>"
