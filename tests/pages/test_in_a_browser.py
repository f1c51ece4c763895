"""Pages in headless Chromium: opened from disk, without a network; used by pointer and by keyboard."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from genctl.events import Began, Ended, Event, Failed, Finished, Hypothesis, Row, Stepped, Token
from tests.cli.tool import genctl
from tests.hostile.corpus import TEXTS
from tests.pages.pages import page_of, search, sentence
from tests.tree.trees import read_tree

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
if CHROMIUM is None:
    pytest.skip("there is no Chromium (Debian: apt-get install chromium)", allow_module_level=True)
playwright = pytest.importorskip("playwright.sync_api", reason="Playwright's Python package is missing")

CONTRAST = 4.5  # WCAG 2.2 AA, normal text
NUMBERS = ("-m", "builtin:numbers", "--color", "never")


pytestmark = pytest.mark.night


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


class Window:
    """A page in a window of its own, with everything that it should not do."""

    def __init__(self, browser: Any, path: Path, *, width: int = 1280, scheme: str = "light") -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
        self.page = self.context.new_page()
        self.wrong: list[str] = []
        self.page.on("console", lambda message: self.wrong.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        self.page.on("dialog", lambda dialog: (self.wrong.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        self.page.on("request", lambda request: self._requested(request.url, path.as_uri()))
        self.page.goto(path.as_uri())

    def _requested(self, url: str, own: str) -> None:
        if url.rpartition("/")[0] != own.rpartition("/")[0]:  # not even beside it, but for the page without scripts
            self.wrong.append(f"request: {url}")


@pytest.fixture
def window(browser: Any, tmp_path: Path) -> Iterator[Any]:
    windows: list[Window] = []

    def opened(content: str | Path, **how: Any) -> Any:
        path = content if isinstance(content, Path) else tmp_path / f"{len(windows)}.html"
        if isinstance(content, str):
            path.write_text(content, "utf-8", "backslashreplace")
        windows.append(Window(browser, path, **how))
        return windows[-1].page

    yield opened
    for one in windows:
        one.context.close()
    assert [wrong for one in windows for wrong in one.wrong if "frame is sandboxed" not in wrong] == []


def made(tmp_path: Path, *words: str, stdin: str | None = None) -> Path:
    path = tmp_path / "real.html"
    assert genctl(*words, "--report", str(path), stdin=stdin).status in (0, 1)
    return path


KINDS = {
    "run": ("run", *NUMBERS, "twelve", "--do-sample", "--explain", "--top-k", "5", "--seed", "1"),
    "beam": ("beam", *NUMBERS, "twelve"),
    "compare": ("compare", *NUMBERS, "-p", "greedy", "-p", "nucleus", "twelve", "nine", "--seed", "1"),
    "score": ("score", "Once upon a time there was a fox."),
    "parity": ("parity", "builtin:stories", "builtin:stories@quantize=int8", "Once upon a time", "-n", "12"),
    "cache": ("inspect-cache", "Once upon a time", "--steps", "3"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_each_kind_of_report_fits_the_window(window: Any, tmp_path: Path, kind: str, width: int, scheme: str) -> None:
    page = window(made(tmp_path, *KINDS[kind]), width=width, scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for control in page.locator("input[type=radio], input[type=checkbox]").all():
        control.check()
    for slider in page.locator("input[type=range]").all():
        for key in ("Home", "ArrowRight", "End"):
            slider.press(key)
    page.screenshot(path=tmp_path / f"{kind}-{width}.png", full_page=True)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_stands_out_from_its_background(window: Any, tmp_path: Path, scheme: str) -> None:
    page = window(page_of([*search(12), *sentence("1", ["a", " b"]), Failed("2", "input", "it failed")]), scheme=scheme)
    page.get_by_label("digits").check()
    worst = page.evaluate(
        """() => {
      const luminance = (color) => {
        const parts = color.match(/[\\d.]+/g).slice(0, 3).map((one) => one / 255)
          .map((one) => (one <= 0.03928 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4));
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
      };
      const behind = (element) => {
        for (let at = element; at; at = at.parentElement) {
          const color = getComputedStyle(at).backgroundColor;
          if (!/, 0\\)$/.test(color)) return color;
        }
        return "rgb(255, 255, 255)";
      };
      const found = [];
      for (const element of document.querySelectorAll("body *")) {
        const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
        if (!own || !element.checkVisibility() || element.closest("svg")) continue;
        const both = [luminance(getComputedStyle(element).color), luminance(behind(element))];
        const [one, other] = both.sort((a, b) => b - a);
        found.push([(one + 0.05) / (other + 0.05), element.outerHTML.slice(0, 100)]);
      }
      return found.sort((a, b) => a[0] - b[0])[0];
    }"""
    )
    assert worst[0] >= CONTRAST, worst


def test_a_token_shows_its_alternatives_and_processors(window: Any) -> None:
    page = window(page_of(search(5)))
    page.locator("#tokens .token").nth(2).click()
    panel = page.locator("#tokens aside")
    assert panel.locator("h3").inner_text().startswith("Token 3:")
    assert panel.locator("table").count() == 2
    assert "top_p" in panel.inner_text()
    assert page.locator("#spoken").text_content().startswith("token 3:")


def test_a_table_shows_each_sequence_from_where_it_leaves_its_nearest(window: Any) -> None:
    page = window(page_of(search(12)))
    rows = page.locator("#tokens .nbest tbody tr")
    count = page.locator("#tokens select").last.locator("option").count()
    assert rows.count() == count > 1
    cells = [rows.nth(place).locator("th, td").all_inner_texts() for place in range(count)]
    assert cells[0][0] == "★ 1"
    assert len({one[2] for one in cells}) == count, "two rows look alike"
    assert any(re.fullmatch(r"\+\d+", one[1]) and one[2].startswith("…") for one in cells[1:])
    rows.nth(1).locator("button").click()
    assert page.locator("#tokens select").last.evaluate("one => one.value") == "1"
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_eos_has_its_name_where_the_page_knows_it(window: Any) -> None:
    page = window(page_of(sentence("0", [" an"], eos="</s>")))
    page.locator("#tokens .token").last.click()
    assert "</s>" in page.locator("#tokens aside h3").inner_text()
    assert "‹id" not in page.locator("#tokens .strip").inner_text()


@pytest.mark.parametrize(("lengths", "median"), [((12, 13, 16), "13"), ((12, 13, 14, 16), "13.5"), ((16, 12), "14")])
def test_the_median_of_an_even_number_is_the_mean_of_the_middle_two(
    window: Any, lengths: tuple[int, ...], median: str
) -> None:
    lanes = [sentence(str(place), [" a"] * (length - 1)) for place, length in enumerate(lengths)]
    page = window(page_of(event for events in lanes for event in events))
    assert page.locator("#rows figcaption").first.inner_text().endswith(f"median {median}")


@pytest.mark.parametrize("prompts", [("twelve",), ("twelve", "nine")])
def test_one_prompt_draws_no_dots_of_single_values(tmp_path: Path, window: Any, prompts: tuple[str, ...]) -> None:
    page = window(made(tmp_path, "compare", *NUMBERS, "-p", "greedy", "-p", "nucleus", *prompts, "--seed", "1"))
    assert page.locator("#comparison table").count() == 1
    assert (page.locator("#comparison .charts circle").count() > 0) is (len(prompts) > 1)


def test_the_keyboard_goes_from_token_to_token(window: Any) -> None:
    page = window(page_of(sentence("0", [" an", " old", " owl"])))
    assert page.locator("#tokens .token[tabindex='0']").count() == 1
    page.locator("#tokens .token").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.dataset.place") == "2"
    assert "owl" in page.locator("#tokens aside h3").inner_text()
    page.keyboard.press("Home")
    assert page.evaluate("document.activeElement.dataset.place") == "0"
    page.keyboard.press("End")
    assert "‹id 99›" in page.locator("#tokens aside h3").inner_text()


def test_the_least_certain_tokens_jump_to_their_place(window: Any) -> None:
    page = window(page_of(search(20)))
    first = page.locator("#tokens .least button").first
    word = re.search(r"“(.*)”", first.inner_text())
    assert word is not None
    first.click()
    assert word[1] in page.locator("#tokens .token.is-open").inner_text()


def test_a_token_of_99_percent_is_not_among_the_least_certain(window: Any) -> None:
    for logprob, listed in ((-0.02, True), (-0.005, False)):
        events: list[Event] = [Began("0", "A prompt", "greedy", "made-up")]
        total = 2 * logprob
        tokens = tuple(Token(id, logprob, word, 1) for id, word in enumerate((" an", " owl")))
        ended = Hypothesis((0, 1), total, total, "length", logprob, text=" an owl")
        events += [Stepped("0", 0, (), (Ended("0", 0, tokens, ended),)), Finished("0", (ended,))]
        assert (window(page_of(events)).locator("#tokens .least").count() == 1) is listed


def test_the_first_sequence_shares_nothing_with_one_above_and_sums_are_rounded_once(window: Any) -> None:
    """Forty tokens of -0.29704999: each rounded to -0.2970 adds up to -11.880, and -11.8819996 rounds to -11.882."""
    logprob, shared = -0.29704999, [Token(id, -0.29704999, f" w{id}", 1) for id in range(39)]
    events: list[Event] = [Began("0", "A prompt", "beam", "made-up", settings={"length_penalty": 0.0})]
    events.append(Stepped("0", 0, (Row("0", 0, tuple(shared), 39 * logprob, 39 * logprob),)))
    ends = []
    for id in (40, 41):
        tokens = (Token(id, logprob, f" w{id}", 1),)
        one = Hypothesis((*range(39), id), 40 * logprob, 40 * logprob, "length", 40 * logprob)
        ends.append(Ended("0", 0, tokens, one))
    events += [Stepped("0", 1, (), tuple(ends)), Finished("0", tuple(end.hypothesis for end in ends))]
    page = window(page_of(events))
    rows = [row.locator("td").all_inner_texts() for row in page.locator("#tokens .nbest tbody tr").all()]
    shares = [cells[0] for cells in rows]
    assert shares == ["", "+39"]
    last = page.locator("#search [aria-label^='step 40:']").first
    last.click()
    panel = page.locator("#search .panel").inner_text()
    assert panel.count("-11.882") == 3  # the log-probability, the total and the score
    assert "total -11.882, score -11.882" in last.get_attribute("aria-label")


def test_colours_follow_the_measure(window: Any) -> None:
    page = window(page_of(search(8)))
    seen = set()
    for radio in page.locator("#tokens input[type=radio]").all():
        radio.check()
        seen.add(tuple(token.get_attribute("class") for token in page.locator("#tokens .token").all()))
    assert len(seen) == 5


def test_the_slider_goes_back_in_the_search_and_dead_branches_fold(window: Any) -> None:
    page = window(page_of(search(6)))
    section = page.locator("#search")
    assert section.locator("output").inner_text() == "6 of 6"
    folded = section.locator("[data-node]").count()
    section.get_by_role("checkbox", name="dead branches").check()
    assert section.locator("[data-node]").count() == 6 * 8 > folded
    slider = section.locator("input[type=range]")
    slider.press("Home")
    assert section.locator("output").inner_text() == "1 of 6"
    assert section.locator("[data-node]").count() == 8


def test_the_page_of_a_tree_draws_the_tree(window: Any, tmp_path: Path) -> None:
    tree, page = tmp_path / "tree.jsonl", tmp_path / "tree.html"
    script = "generate 6\nstart\nsample 2 6\n"
    genctl("explore", "Once upon a time", "--seed", "2", "--script", "-", "--save", str(tree), stdin=script)
    assert genctl("report", str(tree), "-o", str(page)).status == 0
    section = window(page).locator("#search")
    assert section.is_visible()
    assert section.locator("[data-node] text", has_text="★").count() == len(read_tree(tree).leaves) > 1


def test_a_folded_branch_opens(window: Any) -> None:
    page = window(page_of(search(6)))
    before = page.locator("#search [data-node]").count()
    page.locator("#search [data-unfold]").first.click()
    assert page.locator("#search [data-node]").count() > before


def test_the_keyboard_goes_through_the_tree_and_the_formula_follows(window: Any) -> None:
    page = window(page_of(search(6)))
    page.locator("#search [aria-label^='step 4:']").first.focus()
    page.keyboard.press("Enter")
    shown = page.locator("#search .panel").inner_text()
    assert "score = total / tokens ** length_penalty = " in shown
    page.keyboard.press("ArrowLeft")
    assert page.locator("#search .panel").inner_text() != shown
    assert page.evaluate("document.activeElement.dataset.node") is not None


def test_a_long_trunk_is_folded_and_the_fork_is_on_the_screen(window: Any) -> None:
    events = search(40, beams=1)
    page = window(page_of(events))
    assert "tokens that all share" in page.locator("#search [data-chain]").text_content()
    last = page.locator("#search [aria-label^='step 40:']")
    assert "score" in last.get_attribute("aria-label")
    assert "rank" in last.get_attribute("aria-label")
    assert last.bounding_box()["x"] < 1280
    page.locator("#search [data-chain]").click()
    assert page.locator("#search [data-node]").count() == 40


def test_a_tapped_token_has_its_panel_in_view_on_a_phone(window: Any) -> None:
    page = window(page_of(search(40)), width=390)
    page.locator("#tokens .token").nth(3).click()
    box = page.locator("#tokens aside").bounding_box()
    assert 0 <= box["y"] <= 900 - 100


@pytest.mark.parametrize("kind", ["beam", "compare", "run"])
def test_a_phone_shows_the_text_first(window: Any, tmp_path: Path, kind: str) -> None:
    """The panel of a token lies on it only after a token was chosen, and then leaves that token free."""
    page = window(made(tmp_path, *KINDS[kind]), width=390)
    text, summary = page.locator(".strip").first.bounding_box(), page.locator("#summary").bounding_box()
    assert text["y"] + text["height"] <= 900
    assert summary["y"] > page.locator("#views").bounding_box()["y"]
    assert page.locator("nav a").last.inner_text() == "Summary"
    token, panel = page.locator("#tokens .token").last, page.locator("#tokens aside")
    token.scroll_into_view_if_needed()
    below = token.bounding_box()
    assert panel.bounding_box()["y"] >= below["y"] + below["height"]
    token.click()
    chosen, box = token.bounding_box(), panel.bounding_box()
    assert chosen["y"] >= 0
    assert chosen["y"] + chosen["height"] <= box["y"] < 900


def test_the_columns_of_a_comparison_stand_below_each_other_on_a_phone(window: Any, tmp_path: Path) -> None:
    page = window(made(tmp_path, *KINDS["compare"]), width=390)
    for column in page.locator("#comparison .columns > div").all():
        box = column.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 390


def test_the_texts_of_a_tree_stay_in_their_boxes(window: Any) -> None:
    """Letters may be twice as wide as those of Latin."""
    wide = "漢字交じり文章テスト"
    events = [
        replace(event, rows=tuple(replace(row, written=(replace(row.written[0], text=wide),)) for row in event.rows))
        if isinstance(event, Stepped)
        else event
        for event in search(8)
    ]
    for content in (page_of(events), page_of(search(8))):
        page = window(content)
        page.get_by_role("checkbox", name="dead branches").check()
        beyond = page.evaluate(
            """() => [...document.querySelectorAll("#search .node rect ~ text")].filter((text) => {
              const [ours, box] = [text.getBBox(), text.parentNode.querySelector("rect").getBBox()];
              return ours.x < box.x || ours.x + ours.width > box.x + box.width;
            }).map((text) => text.textContent)"""
        )
        assert beyond == []
        assert page.locator("#search .node rect ~ text").count() > 20


def test_charts_and_the_processor_table_fit_their_column(window: Any) -> None:
    for width in (1280, 390):
        page = window(page_of(search(40)), width=width)
        for part in page.locator("#tokens figure, #tokens aside").all():
            assert part.evaluate("(one) => one.scrollWidth <= one.clientWidth + 1"), part.inner_text()
        chart = page.locator("#tokens figure svg").first
        assert chart.evaluate("(one) => one.clientWidth >= 0.9 * one.parentElement.clientWidth")
        # charts are drawn before the page is long enough for a scrollbar, which this browser does not have
        assert page.evaluate("getComputedStyle(document.documentElement).scrollbarGutter") == "stable"


def test_a_long_search_is_shown_in_parts(window: Any) -> None:
    page = window(page_of(search(1250)))
    assert page.locator("#search [data-node]").count() < 400
    page.locator("#search input[type=range]").press("ArrowLeft")
    assert page.locator("#search output").inner_text() == "1249 of 1250"


def test_prompts_sort_and_filter_and_open(window: Any) -> None:
    lanes = [
        sentence(str(place), [" w"] * length, prompt=f"Prompt {place}", place=place)
        for place, length in enumerate((3, 1, 2), 1)
    ]
    page = window(page_of([*(event for lane in lanes for event in lane), Failed("9", "input", "broken")]))
    rows = page.locator("#rows tbody tr")
    assert rows.count() == 4
    heading = page.get_by_role("columnheader", name="tokens", exact=True)
    heading.get_by_role("button").click()
    assert heading.get_attribute("aria-sort") == "ascending"
    assert [text for text in page.locator("#rows tbody tr td:nth-child(4)").all_inner_texts() if text != "–"] == [
        "2",
        "3",
        "4",
    ]
    page.get_by_label("Filter").fill("Prompt 2")
    assert rows.count() == 1
    rows.locator("button").click()
    assert page.locator("#tokens .prompt").inner_text() == "Prompt 2"
    page.get_by_label("Filter").fill("broken")
    assert rows.count() == 1


def test_columns_scroll_together_and_show_where_texts_part(window: Any) -> None:
    one = sentence("a/0/7", [" a"] * 3000, seed=7)
    two = sentence("b/0/7", [" a"] * 150 + [" b"] * 3000, seed=7)
    page = window(page_of([*one, *two]))
    strips = page.locator("#comparison .strip")
    assert strips.count() == 2
    strips.nth(0).evaluate("(one) => { one.scrollTop = 200; }")
    page.wait_for_timeout(200)
    assert strips.nth(1).evaluate("(one) => one.scrollTop") == 200
    page.get_by_label("scroll together").uncheck()
    strips.nth(0).evaluate("(one) => { one.scrollTop = 40; }")
    page.wait_for_timeout(50)
    assert strips.nth(1).evaluate("(one) => one.scrollTop") == 200


def test_both_probabilities_stand_at_the_first_difference(window: Any, tmp_path: Path) -> None:
    page = window(
        made(tmp_path, "compare", "-p", "greedy", "-p", "nucleus", "Once upon a time", "--seed", "2", "-n", "20")
    )
    note = page.locator("#comparison .columns > div").nth(1).locator(".note").first.inner_text()
    assert re.fullmatch(r"after \d+ tokens?: .+ [\d.]+% instead of .+ [\d.]+%", note)
    assert page.locator("#comparison .token.parts").count() == 1


def test_hostile_texts_are_shown_and_do_nothing(window: Any) -> None:
    hostile = [
        *TEXTS,
        "</script><script>document.title = 'gone'</script>",
        "<img src=x onerror=alert(1)>",
        "\ud800",
        "a\u0000b",
    ]
    events = [event for place, text in enumerate(hostile) for event in sentence(str(place), [text, "end"], prompt=text)]
    page = window(page_of(events, job="</pre><script>alert(1)</script>", command="<b>x</b>"))
    assert page.title() == "made-up · sample"
    assert page.locator("img, #views script, b").count() == 0
    assert page.locator("#rows tbody tr").count() == len(hostile)
    page.locator("#tokens select").first.select_option(index=len(hostile) - 3)
    assert "<img src=x onerror=alert(1)>" in page.locator("#tokens .strip").inner_text()


def test_without_scripts_the_texts_are_there(window: Any, tmp_path: Path) -> None:
    (tmp_path / "inner.html").write_text(page_of(sentence("0", [" an", " owl"], prompt="I saw")))
    page = window('<!doctype html><iframe sandbox src="inner.html" width="900" height="900"></iframe>')
    inner = page.frame_locator("iframe")
    inner.locator("noscript table").wait_for(timeout=5000)
    assert inner.locator("noscript .prompt").inner_text() == "I saw"
    assert inner.locator("noscript .text").inner_text().strip() == "an owl"


def test_a_page_prints_all_of_its_texts(window: Any) -> None:
    page = window(page_of(sentence("0", [" word"] * 2000)))
    page.emulate_media(media="print")
    strip = page.locator("#tokens .strip")
    assert strip.evaluate("(one) => one.scrollHeight <= one.clientHeight + 1")
    assert not page.locator("nav").is_visible()
