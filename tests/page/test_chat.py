"""The chat: text comes as it is generated, can be stopped, repeated, branched and looked into."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests.harness.ring.launched import Launched, wait_until
from tests.page.conftest import WAIT_MS, Visitor

PROMPT = "import os\n\ndef main("
expect.set_options(timeout=WAIT_MS)


@pytest.fixture
def page(visit: Callable[..., Visitor], launch: Launched) -> Page:
    return visit().open(f"{launch.url}/")


def send(page: Page, text: str = PROMPT, **fields: str) -> None:
    for name, value in fields.items():
        page.locator(f"#field-{name}").fill(value)
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_role("button", name="Send").click()


def answer(page: Page) -> str:
    """Wait for the whole answer and return its text."""
    expect(page.locator("article.assistant[aria-busy=false] footer")).to_be_visible()
    text: str = page.locator("article.assistant .text").inner_text()
    return text


def body_of(page: Page) -> dict[str, Any]:
    """Return the request that the page says it has sent."""
    page.get_by_text("Request", exact=True).last.click()
    body: dict[str, Any] = json.loads(page.locator(".copied pre").first.inner_text())
    return body


def test_text_is_seen_before_the_end_and_a_stop_frees_the_row(page: Page, launch: Launched) -> None:
    page.get_by_text("More fields").click()
    page.locator("#field-ignore_eos").select_option("true")
    send(page, max_tokens="1900")
    live = page.locator("article.assistant[aria-busy=true] .text")
    expect(live).to_have_text(re.compile(r"[\s\S]{20}"))
    assert httpx.get(f"{launch.url}/stats").json()["num_running"] == 1
    page.get_by_label("Message", exact=True).focus()
    page.keyboard.press("Escape")
    wait_until(lambda: httpx.get(f"{launch.url}/stats").json()["num_running"] == 0, 1.0, "the row is free")
    expect(page.locator(".facts")).to_contain_text("ended by stopped")


def test_the_same_seed_gives_the_same_text_on_a_branch_of_its_own(page: Page) -> None:
    send(page, seed="7", max_tokens="24", temperature="1")
    first = answer(page)
    assert first
    page.get_by_role("button", name="Again").click()
    expect(page.locator(".branches")).to_contain_text("2 of 2")
    assert answer(page) == first
    page.locator("#field-seed").fill("8")
    page.get_by_role("button", name="Again").click()
    expect(page.locator(".branches")).to_contain_text("3 of 3")
    assert answer(page) != first
    page.get_by_role("button", name="Branch before").click()
    assert answer(page) == first


def test_shown_log_probabilities_are_those_of_the_api(page: Page, launch: Launched) -> None:
    page.get_by_label("Log-probabilities").select_option("3")
    send(page, temperature="0", max_tokens="8")
    answer(page)
    body = body_of(page) | {"stream": False}
    del body["stream_options"]
    told = httpx.post(f"{launch.url}/v1/chat/completions", json=body, timeout=60).json()
    tokens = told["choices"][0]["logprobs"]["content"]
    assert page.locator(".token").count() == len(tokens) == 8
    for index in (0, 3, 7):
        page.locator(".token").nth(index).click()
        token = tokens[index]
        assert float(page.locator(".logprob").inner_text()) == pytest.approx(token["logprob"], abs=1e-4)
        rows = page.locator(".alternatives tbody tr").all()
        shown = [row.locator("td").all_inner_texts() for row in rows]
        assert [json.loads(text) for text, _, _ in shown] == [each["token"] for each in token["top_logprobs"]]
        assert [float(value) for _, _, value in shown] == pytest.approx(
            [each["logprob"] for each in token["top_logprobs"]], abs=1e-4
        )
        page.locator(".token").nth(index).click()


def test_an_edited_message_is_a_branch_and_the_system_prompt_goes_first(page: Page) -> None:
    page.get_by_label("System prompt").fill("# a module")
    send(page, "def a(", max_tokens="3")
    answer(page)
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Edited message").fill("def b(")
    page.locator(".editor").get_by_role("button", name="Send").click()
    expect(page.locator("article.user .branches")).to_contain_text("2 of 2")
    answer(page)
    body = body_of(page)
    assert body["messages"] == [
        {"role": "system", "content": "# a module"},
        {"role": "user", "content": "def b("},
    ]
    page.locator("article.user").get_by_role("button", name="Branch before").click()
    expect(page.locator("article.user .text")).to_have_text("def a(")


def test_the_command_sends_what_the_page_has_sent(page: Page, launch: Launched) -> None:
    send(page, "it's `$HOME`\n", temperature="0", max_tokens="5")
    answer(page)
    body = body_of(page)
    command = page.locator(".copied pre").nth(1).inner_text()
    quoted = json.dumps(body, indent=2).replace("'", "'\\''")
    assert command.endswith(f"-d '{quoted}'")
    assert f"'{launch.url}/v1/chat/completions'" in command
    assert "Authorization" not in command


def test_several_answers_are_branches(page: Page) -> None:
    page.get_by_text("More fields").click()
    send(page, n="3", max_tokens="6", temperature="1", seed="1")
    expect(page.locator(".branches")).to_contain_text("1 of 3")
    texts = {answer(page)}
    for _ in range(2):
        page.get_by_role("button", name="Branch after").click()
        texts.add(answer(page))
    assert len(texts) == 3


def test_a_field_out_of_its_bounds_is_told_before_anything_is_sent(page: Page) -> None:
    field = page.locator("#field-temperature")
    for wrong in ("101", "-1", "warm"):
        field.fill(wrong)
        expect(field).to_have_attribute("aria-invalid", "true")
    page.get_by_label("Message", exact=True).fill("x")
    expect(page.get_by_role("button", name="Send")).to_be_disabled()
    expect(page.locator(".composer .wrong")).to_contain_text("temperature")
    page.get_by_label("Message", exact=True).press("Enter")
    expect(page.locator("article")).to_have_count(0)
    field.fill("0.5")
    expect(page.get_by_role("button", name="Send")).to_be_enabled()


def test_a_seed_of_64_bits_is_sent_to_the_last_digit(page: Page) -> None:
    send(page, seed="9223372036854775807", max_tokens="1")
    answer(page)
    assert body_of(page)["seed"] == (1 << 63) - 1


def test_what_the_server_refuses_stands_below_the_answer(
    visit: Callable[..., Visitor], launch: Launched
) -> None:
    visitor = visit()
    visitor.allowed_statuses = {400}
    page = visitor.open(f"{launch.url}/")
    page.get_by_text("More fields").click()
    send(page, best_of="3")
    expect(page.locator("article.assistant .problem")).to_contain_text("best_of")


def test_every_sampling_field_is_there_with_its_bounds(page: Page, launch: Launched) -> None:
    document = httpx.get(f"{launch.url}/openapi.json").json()
    properties = document["components"]["schemas"]["ChatBody"]["properties"]
    page.get_by_text("More fields").click()
    for name in ("top_k", "min_p", "logit_bias", "bad_words", "top_p_decay", "no_repeat_ngram_size"):
        assert page.locator(f"#field-{name}").is_visible(), name
    bounded = {
        name: option
        for name, schema in properties.items()
        for option in schema.get("anyOf", [])[:1]
        if option.get("type") in ("integer", "number") and name != "top_logprobs"
    }
    assert len(bounded) > 15
    for name, option in bounded.items():
        hint = page.locator(f"#field-{name}-hint").inner_text()
        assert f"{option['maximum']:g}" in hint or str(int(option["maximum"])) in hint, name


def test_the_keyboard_alone_is_enough(page: Page) -> None:
    page.locator("#field-max_tokens").fill("3")
    page.get_by_label("Message", exact=True).focus()
    page.keyboard.type("def ")
    page.keyboard.press("Shift+Enter")
    page.keyboard.press("Enter")
    answer(page)
    page.keyboard.press("Shift+Tab")
    assert page.evaluate("document.activeElement.closest('.turn, .log') !== null")
    page.get_by_role("link", name="Ring").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Processes")).to_be_visible()


def test_an_answer_leads_to_its_timeline(page: Page) -> None:
    send(page, max_tokens="4")
    answer(page)
    page.get_by_text("Request", exact=True).last.click()
    page.get_by_role("link", name="timeline").click()
    expect(page.locator(".sequence")).to_contain_text("ended by")
    for moment in ("tokenizer_in", "row", "first_token", "closed"):
        expect(page.get_by_role("cell", name=moment, exact=True)).to_be_visible()
    page.get_by_role("link", name="Chat").click()
    expect(page.locator("article.assistant")).to_be_visible()
