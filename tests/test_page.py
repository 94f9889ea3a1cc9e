"""The chat page in headless Chromium, against a server whose answers are known."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from page_server import CONTRASTS, HOSTILE, MARKDOWN, FakeServer, fake_server
from server_client import TinyServer, make_llm

from rvllm import SamplingParams

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
if not os.environ.get("CI"):
    pytest.importorskip("playwright", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("there is no chromium", allow_module_level=True)

from playwright.sync_api import Browser, Error, Locator, Page, expect, sync_playwright  # noqa: E402

expect.set_options(timeout=20_000)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server() as server:
        yield server


@pytest.fixture
def page(browser: Browser, server: FakeServer) -> Iterator[Page]:
    """The page, loaded; at the end no script may have failed, and nothing been refused by the policy."""
    context = browser.new_context(viewport={"width": 1280, "height": 800}, permissions=["clipboard-read"])
    context.set_default_navigation_timeout(120_000)  # the first page starts processes of the browser
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on(
        "console",
        lambda m: problems.append(m.text) if re.search("Content Security|Trusted", m.text) else None,
    )
    page.on("request", lambda r: None if r.url.startswith((server.url, "data:")) else problems.append(r.url))
    page.goto(server.url)
    yield page
    context.close()
    assert problems == []


def send(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def answers(page: Page) -> Locator:
    return page.locator(".message.assistant .markdown")


def finish(page: Page) -> None:
    expect(page.get_by_role("button", name="Send")).to_be_visible()


# Chat


def test_an_answer_streams_and_the_next_question_carries_the_history(page: Page, server: FakeServer) -> None:
    server.go_on.clear()
    send(page, "tell me all of it")
    expect(answers(page)).to_have_text("You said:")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    server.go_on.set()
    expect(answers(page)).to_have_text("You said: tell me all of it")
    expect(page.locator("#announcer")).to_have_text("You said: tell me all of it")
    expect(page.locator(".figures")).to_contain_text("7 tokens")
    expect(page.locator(".figures")).to_contain_text("s to first token")
    expect(page.locator("#context")).to_have_text("27 of 8,192 tokens of context")
    expect(page.locator("#title")).to_have_text("tell me all of it")
    send(page, "more")
    expect(answers(page).last).to_have_text("You said: more")
    assert server.requests[1]["messages"] == [
        {"role": "user", "content": "tell me all of it"},
        {"role": "assistant", "content": "You said: tell me all of it"},
        {"role": "user", "content": "more"},
    ]
    assert server.requests[1]["model"] == "tiny-model" and server.requests[1]["stream"] is True


@pytest.mark.parametrize("how", ["escape", "button"])
def test_stop_keeps_what_came_and_hangs_up(page: Page, server: FakeServer, how: str) -> None:
    server.go_on.clear()
    send(page, "a long story")
    expect(answers(page)).to_have_text("You said:")
    if how == "escape":
        page.keyboard.press("Escape")
    else:
        page.get_by_role("button", name="Stop").click()
    finish(page)
    expect(page.locator(".note")).to_have_text("Stopped")
    expect(answers(page)).to_have_text("You said:")
    for _ in range(500):
        if server.hang_ups:
            break
        page.wait_for_timeout(20)
    assert server.hang_ups == 1
    server.go_on.set()
    page.get_by_role("button", name="Continue the answer").click()
    expect(answers(page)).to_have_text("You said:You said: You said:")
    assert server.requests[1]["continue_final_message"] is True
    assert server.requests[1]["messages"][-1] == {"role": "assistant", "content": "You said:"}


def test_regenerate_and_edit(page: Page, server: FakeServer) -> None:
    send(page, "one")
    finish(page)
    send(page, "two")
    expect(answers(page).last).to_have_text("You said: two")
    server.answers["two"] = "something else"
    page.get_by_role("button", name="Answer again").last.click()
    expect(answers(page).last).to_have_text("something else")
    assert server.requests[2]["messages"] == server.requests[1]["messages"]
    page.locator(".message.user").first.hover()
    page.get_by_role("button", name="Edit the message").first.click()
    page.get_by_role("textbox", name="Edit the message").fill("three")
    page.keyboard.press("Enter")
    expect(answers(page)).to_have_text(["You said: three"])
    assert server.requests[3]["messages"] == [{"role": "user", "content": "three"}]


def test_two_conversations_answer_at_a_time(page: Page, server: FakeServer) -> None:
    server.go_on.clear()
    send(page, "the first one")
    expect(answers(page)).to_have_text("You said:")
    page.get_by_role("button", name="New chat").click()
    send(page, "the second one")
    expect(answers(page)).to_have_text("You said:")
    expect(page.get_by_label("answering")).to_have_count(2)
    server.go_on.set()
    expect(answers(page)).to_have_text("You said: the second one")
    page.get_by_role("button", name="the first one", exact=True).click()
    expect(answers(page)).to_have_text("You said: the first one")
    expect(page.get_by_label("answering")).to_have_count(0)


def test_reasoning_is_apart_from_the_answer(page: Page, server: FakeServer) -> None:
    server.reasoning = "let me <b>think</b>"
    send(page, "why")
    expect(answers(page)).to_have_text("You said: why")
    page.get_by_text("Thoughts").click()
    expect(page.locator(".reasoning div")).to_have_text("let me <b>think</b>")
    send(page, "and")
    finish(page)
    assert server.requests[1]["messages"][1]["content"] == "You said: why"


def test_the_real_server(browser: Browser, tmp_path: Path) -> None:
    llm = make_llm(tmp_path)
    question = {"role": "user", "content": "hello"}
    expected = llm.chat([question], SamplingParams(temperature=0, max_tokens=12))[0].outputs[0].text
    served = TinyServer(llm, api_keys=("secret",))
    page = browser.new_page()
    try:
        with served.on_socket() as url:
            page.goto(url)
            page.get_by_role("dialog").get_by_label("API key").fill("secret")
            page.keyboard.press("Enter")
            expect(page.get_by_label("Model")).to_have_value("tiny")
            expect(page.locator("#server-state")).to_have_text("Ready")
            page.get_by_role("button", name="Settings", exact=True).click()
            page.get_by_role("spinbutton", name="Temperature").fill("0")
            page.get_by_role("spinbutton", name="Longest answer").fill("12")
            send(page, "hello")
            expect(page.locator(".note")).to_have_text("Stopped at the token limit")
            expect(page.locator(".figures")).to_contain_text("12 tokens")
            kept = page.evaluate("Object.entries(localStorage).find(([k]) => k.startsWith('rvllm.chat.'))[1]")
            assert json.loads(kept)["messages"][1]["content"] == expected
            send(page, "x" * 600)
            expect(page.get_by_role("alert")).to_contain_text("too long for this model")
            page.get_by_role("button", name="New chat").click()
            page.get_by_role("spinbutton", name="Longest answer").fill("400")
            send(page, "hello")
            expect(page.locator(".message.assistant .figures")).to_contain_text("tokens")
            page.keyboard.press("Escape")
            served.assert_idle()
    finally:
        page.close()
        served.close()


# Text


def test_markdown(page: Page, server: FakeServer) -> None:
    server.answers["show"] = MARKDOWN
    send(page, "show")
    answer = answers(page)
    expect(answer.locator("h3")).to_have_text("Title")
    expect(answer.locator("strong")).to_have_text("bold")
    expect(answer.locator("em")).to_have_text("slanted")
    expect(answer.locator("ol > li")).to_have_count(2)
    expect(answer.locator("ol ul li")).to_have_text("inner")
    expect(answer.locator("td.right")).to_have_text("2")
    link = answer.get_by_role("link")
    assert (link.get_attribute("href"), link.get_attribute("rel")) == (
        "https://example.com/a",
        "noopener noreferrer nofollow",
    )
    page.get_by_role("button", name="Copy the code").click()
    expect(page.get_by_role("button", name="Copy the code")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == 'print("<hi>")\n'
    assert page.evaluate("document.querySelector('.markdown').querySelectorAll('p').length") == 1


def test_hostile_text_stays_text(page: Page, server: FakeServer) -> None:
    server.answers[HOSTILE] = server.reasoning = HOSTILE
    send(page, HOSTILE)
    finish(page)
    expect(answers(page)).to_contain_text('onerror="window.hacked=1"')
    expect(page.locator(".message.user .text")).to_have_text(HOSTILE)
    tags = page.evaluate(
        "[...new Set([...document.querySelectorAll('.markdown *')].map(e => e.localName))].sort()"
    )
    assert not {"img", "script", "b", "i", "iframe"} & set(tags)
    links = page.evaluate("[...document.querySelectorAll('.markdown a')].map(a => a.protocol)")
    assert set(links) == {"https:"}
    attributes = page.evaluate(
        "[...document.querySelectorAll('#messages *')].flatMap(e => e.getAttributeNames())"
    )
    assert not [name for name in attributes if name.startswith("on")]
    page.reload()
    expect(answers(page)).to_contain_text('onerror="window.hacked=1"')
    assert page.evaluate("window.hacked") is None


def test_markup_cannot_be_written_by_script(browser: Browser, server: FakeServer) -> None:
    page = browser.new_page()
    page.goto(server.url)
    with pytest.raises(Error, match="TrustedHTML"):
        page.evaluate("document.body.innerHTML = '<b>x</b>'")
    page.close()


# Settings


def test_sampling_and_system_prompt(page: Page, server: FakeServer) -> None:
    page.get_by_role("button", name="Settings", exact=True).click()
    page.get_by_label("System prompt").fill("Be brief.")
    for label, value in {"Top K": "40", "Seed": "7", "Longest answer": "", "Temperature": "0.25"}.items():
        page.get_by_role("spinbutton", name=label).fill(value)
    page.get_by_role("spinbutton", name="Top P").fill("1.5")
    expect(page.get_by_text("Must be a number from 0 to 1.")).to_be_visible()
    send(page, "hi")
    finish(page)
    body = server.requests[0]
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    sampling = {
        name: body.get(name) for name in ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed")
    }
    assert sampling == {
        "temperature": 0.25,
        "top_p": 0.95,
        "top_k": 40,
        "min_p": 0.05,
        "max_tokens": None,
        "seed": 7,
    }
    page.reload()
    page.get_by_role("button", name="Settings", exact=True).click()
    expect(page.get_by_role("spinbutton", name="Seed")).to_have_value("7")
    expect(page.get_by_label("System prompt")).to_have_value("Be brief.")
    page.get_by_role("button", name="Reset sampling").click()
    expect(page.get_by_role("spinbutton", name="Temperature")).to_have_value("0.7")


def test_conversations_are_kept_renamed_deleted_and_brought_back(page: Page) -> None:
    send(page, "first")
    finish(page)
    page.get_by_role("button", name="New chat").click()
    send(page, "second")
    finish(page)
    page.reload()
    rows = page.locator(".conversation")
    expect(rows).to_have_text(["second", "first"])
    expect(answers(page)).to_have_text("You said: second")
    rows.first.hover()
    page.get_by_role("button", name="Rename second").click()
    page.get_by_label("Title").fill("renamed")
    page.keyboard.press("Enter")
    expect(rows).to_have_text(["renamed", "first"])
    rows.first.hover()
    page.get_by_role("button", name="Delete renamed").click()
    expect(rows).to_have_text(["first"])
    expect(page.get_by_role("heading", name="What shall we talk about?")).to_be_visible()
    page.get_by_role("button", name="Undo").click()
    expect(rows).to_have_text(["renamed", "first"])
    expect(answers(page)).to_have_text("You said: second")


# Failures


@pytest.mark.parametrize(
    ("status", "headers", "error", "texts"),
    [
        (
            400,
            {},
            {"message": "top_k must be less"},
            ["The server refused the request", "top_k must be less"],
        ),
        (413, {}, {"message": "the body is larger"}, ["The message is too large", "the body is larger"]),
        (429, {"Retry-After": "7"}, {"message": "queue full."}, ["The server is busy", "Try again in 7 s."]),
        (500, {}, {"message": "internal error"}, ["The server failed", "internal error"]),
        (503, {}, {"message": "loading"}, ["The server is not ready", "loading"]),
    ],
)
def test_errors_are_told_and_can_be_tried_again(
    page: Page,
    server: FakeServer,
    status: int,
    headers: dict[str, str],
    error: dict[str, str],
    texts: list[str],
) -> None:
    server.failures.append((status, headers, error))
    send(page, "hi")
    for text in texts:
        expect(page.get_by_role("alert")).to_contain_text(text)
    page.reload()
    expect(page.locator(".problem")).to_contain_text(texts[0])
    page.get_by_role("button", name="Try again").click()
    expect(answers(page)).to_have_text("You said: hi")
    expect(page.locator(".problem:visible")).to_have_count(0)


def test_answer_that_breaks_off(page: Page, server: FakeServer) -> None:
    server.breaks = True
    send(page, "a long story")
    expect(page.get_by_role("alert")).to_contain_text("The answer broke off")
    expect(answers(page)).to_have_text("You said:")
    server.breaks = False
    server.answers["You said:"] = " a long story"
    page.get_by_role("button", name="Try again").click()
    expect(answers(page)).to_have_text("You said: a long story")


def test_server_that_has_gone(page: Page, server: FakeServer) -> None:
    expect(page.locator("#server-state")).to_have_text("Ready")
    server.die()
    send(page, "hi")
    expect(page.get_by_role("alert")).to_contain_text("No answer from the server")
    expect(page.locator("#server-state")).to_have_text("Not reachable")


def test_too_long_a_conversation_leaves_out_the_oldest(page: Page, server: FakeServer) -> None:
    send(page, "one")
    finish(page)
    error = {"message": "the prompt has 9000 tokens", "code": "context_length_exceeded"}
    server.failures.append((400, {}, error))
    send(page, "two")
    expect(page.get_by_role("alert")).to_contain_text("too long for this model")
    page.get_by_role("button", name="Leave out the oldest messages").click()
    expect(answers(page).last).to_have_text("You said: two")
    expect(page.locator(".cut")).to_have_text("The messages above are no longer sent")
    assert server.requests[2]["messages"] == [{"role": "user", "content": "two"}]


def test_api_key(browser: Browser, server: FakeServer) -> None:
    server.api_key = "secret"
    page = browser.new_page()
    page.goto(server.url)
    dialog = page.get_by_role("dialog", name="API key")
    dialog.get_by_label("API key").fill("wrong")
    page.keyboard.press("Enter")
    expect(dialog).to_be_visible()
    dialog.get_by_label("API key").fill("secret")
    page.keyboard.press("Enter")
    expect(dialog).to_be_hidden()
    expect(page.get_by_label("Model")).to_have_value("tiny-model")
    send(page, "hi")
    expect(answers(page)).to_have_text("You said: hi")
    page.close()


# Look


def test_server_gauges(page: Page, server: FakeServer) -> None:
    expect(page.locator("#server-running")).to_have_text("3")
    expect(page.locator("#server-waiting")).to_have_text("1")
    expect(page.locator("#server-kv")).to_have_text("42 %")
    expect(page.get_by_role("meter")).to_have_attribute("aria-valuenow", "42.0")
    server.health = {"status": "loading"}
    expect(page.locator("#server-state")).to_have_text("Loading the model")
    expect(page.locator("#server-running")).to_have_text("\u2013")


def test_theme_follows_the_system_until_it_is_chosen(page: Page) -> None:
    def ground() -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    page.emulate_media(color_scheme="dark")
    dark = ground()
    page.emulate_media(color_scheme="light")
    light = ground()
    assert dark != light
    page.get_by_role("button", name="Theme: as the system").click()
    page.get_by_role("button", name="Theme: light").click()
    assert ground() == dark
    page.reload()
    assert ground() == dark
    page.get_by_role("button", name="Theme: dark").click()
    assert ground() == light


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_contrast(page: Page, theme: str) -> None:
    page.emulate_media(color_scheme=theme)  # type: ignore[arg-type]
    ratios = page.evaluate(CONTRASTS)
    assert len(ratios) == 28
    assert {pair: ratio for pair, ratio in ratios.items() if ratio < 4.5} == {}


def test_phone(page: Page) -> None:
    page.set_viewport_size({"width": 360, "height": 700})
    expect(page.get_by_role("navigation")).to_be_hidden()
    send(page, "x" * 400)
    expect(answers(page)).to_contain_text("xxx")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.get_by_role("button", name="Conversations").click()
    expect(page.get_by_role("navigation")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("navigation")).to_be_hidden()


def test_keyboard(page: Page, server: FakeServer) -> None:
    field = page.get_by_label("Message", exact=True)
    expect(field).to_be_focused()
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    expect(field).to_have_value("one\ntwo")
    page.keyboard.press("Enter")
    expect(field).to_have_value("")
    expect(field).to_be_focused()
    finish(page)
    assert server.requests[0]["messages"] == [{"role": "user", "content": "one\ntwo"}]
    nameless = page.evaluate(
        "[...document.querySelectorAll('button')].filter(b => !b.ariaLabel && !b.textContent.trim()).length"
    )
    assert nameless == 1  # the toast's, which is hidden and gets its text with its meaning
    page.keyboard.press("Shift+Tab")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
