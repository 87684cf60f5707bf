"""A model that writes attacks: none of it runs, loads or leads anywhere."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

from playwright.sync_api import expect

from runtime.wire.messages import GenerateRequest, SequenceOutput
from tests.harness.ring.fake_ring import finish, output
from tests.page.conftest import Visitor, scripted

RUN = "window.ran=1"
ADDRESS = "http://evil.example/x"
ATTACKS = (
    f"<script>{RUN}</script>",
    f"<SCRIPT SRC={ADDRESS}></SCRIPT>",
    f"<scr<script>ipt>{RUN}</scr</script>ipt>",
    f"<img src=x onerror={RUN}>",
    f"<img src={ADDRESS}>",
    f'<img src="x" onerror="{RUN}" style="background:url({ADDRESS})">',
    f"<svg onload={RUN}>",
    f"<svg><script>{RUN}</script></svg>",
    f"<svg><animate onbegin={RUN} attributeName=x dur=1s>",
    f'<svg><a xlink:href="javascript:{RUN}"><text y=20>x</text></a></svg>',
    f"<svg><use href='data:image/svg+xml,<svg id=x onload={RUN}></svg>#x'></svg>",
    f"<svg><style><img src=x onerror={RUN}></style></svg>",
    f"<math><mtext><table><mglyph><style><img src=x onerror={RUN}></style></mglyph></table></mtext></math>",
    f'<math><a xlink:href="javascript:{RUN}">x</a></math>',
    f"<iframe src=javascript:{RUN}></iframe>",
    '<iframe srcdoc="<script>parent.ran=1</script>"></iframe>',
    f"<object data=javascript:{RUN}></object>",
    f"<embed src=javascript:{RUN}>",
    f"<body onload={RUN}>",
    f"<details open ontoggle={RUN}>x</details>",
    f"<video><source onerror={RUN}></video>",
    f"<audio src=x onerror={RUN}>",
    f"<input autofocus onfocus={RUN}>",
    f"<form action=javascript:{RUN}><button>x</button></form>",
    f"<a href=javascript:{RUN}>x</a>",
    f'<a href="java&#x09;script:{RUN}">x</a>',
    f"<base href={ADDRESS}>",
    f"<link rel=stylesheet href={ADDRESS}>",
    f"<meta http-equiv=refresh content='0;url=javascript:{RUN}'>",
    f"<style>@import '{ADDRESS}';</style>",
    f'<p style="background:url({ADDRESS})">x</p>',
    f"<template><script>{RUN}</script></template>",
    f'<noscript><p title="</noscript><img src=x onerror={RUN}>"></noscript>',
    f"<!--><img src=x onerror={RUN}>-->",
    f"<![CDATA[<img src=x onerror={RUN}>]]>",
    f"<?xml x?><img src=x onerror={RUN}>",
    f"[x](javascript:{RUN})",
    f"[x](JaVaScRiPt:{RUN})",
    f"[x](java\tscript:{RUN})",
    f"[x](&#106;avascript:{RUN})",
    f"[x](data:text/html,<script>{RUN}</script>)",
    f"[x](vbscript:{RUN})",
    "[x](/flush_cache)",
    f"![x]({ADDRESS})",
    f"![x](javascript:{RUN})",
    f"[![x]({ADDRESS})](javascript:{RUN})",
    f"<javascript:{RUN}>",
    f"[x]: javascript:{RUN}\n\n[x]",
    f'[x](https://a.example "\'onmouseover={RUN} ")',
    f'[a](https://a.example/"onmouseover="{RUN})',
)
FRAMES = (
    "{}",
    "text {} text",
    "- {}\n  - {}",
    "> {}",
    "# {}",
    "| a |\n|---|\n| {} |",
    "**{}** _{}_",
    "<div>\n{}\n\n{}",
    "```html\n{}",
    "`{}` ~~{}~~",
)
HOSTILE = [frame.replace("{}", attack) for attack, frame in product(ATTACKS, FRAMES)]

# In the page, as a person does it: write, send, wait for the whole answer, look, begin again.
CHAT = """
async (count) => {
  const next = () => new Promise((resolve) => setTimeout(resolve, 0));
  const found = [];
  for (let index = 0; index < count; index++) {
    const box = document.getElementById("message");
    box.value = "say it";
    box.dispatchEvent(new Event("input", { bubbles: true }));
    let send;
    while (!(send = document.querySelector(".composer button[type=submit]:enabled"))) await next();
    send.click();
    while (!document.querySelector("article.assistant[aria-busy=false] footer")) await next();
    const text = document.querySelector("article.assistant .text");
    const elements = [...text.querySelectorAll("*")];
    found.push({
      shown: text.innerText,
      tags: [...new Set(elements.map((each) => each.tagName))],
      attributes: [...new Set(elements.flatMap((each) => each.getAttributeNames()))],
      links: [...text.querySelectorAll("[href]")].map((each) => each.protocol + "//" + each.host),
      ran: "ran" in window,
    });
    [...document.querySelectorAll(".composer button")].at(-1).click();
    while (document.querySelector("article")) await next();
  }
  return found;
}
"""
HARMLESS_TAGS = {
    *("P", "BR", "HR", "H1", "UL", "LI", "PRE", "CODE", "EM", "STRONG", "DEL", "BLOCKQUOTE", "A"),
    *("TABLE", "THEAD", "TBODY", "TR", "TH", "TD"),
}


def test_500_hostile_answers_run_nothing(visit: Callable[..., Visitor], tmp_path: Path) -> None:
    assert len(HOSTILE) == len(set(HOSTILE)) == 500
    texts = iter(HOSTILE)

    def speak(request: GenerateRequest) -> list[SequenceOutput]:
        text = next(texts)
        middle = len(text) // 2
        return [
            output(request, text[:middle]),
            output(request, text[middle:]),
            SequenceOutput(request.handle, finish=finish("stop", len(text))),
        ]

    with scripted(tmp_path, speak) as front:
        page = visit().open(f"http://127.0.0.1:{front.port}/")
        page.locator("#field-max_tokens").fill("8")
        found: list[dict[str, Any]] = page.evaluate(CHAT, len(HOSTILE))
    for text, seen in zip(HOSTILE, found, strict=True):
        assert not seen["ran"], text
        assert set(seen["tags"]) <= HARMLESS_TAGS, text
        assert set(seen["attributes"]) <= {"href", "target", "rel"}, text
        assert all(re.match("https?://", link) for link in seen["links"]), text
        assert seen["shown"].strip(), text


def test_markdown_is_shown_as_such_and_html_as_text(visit: Callable[..., Visitor], tmp_path: Path) -> None:
    text = "# Title\n\n- **bold** [link](https://a.example/b) <b>tag</b>\n\n```\n<i>code</i>\n```\n"

    def speak(request: GenerateRequest) -> list[SequenceOutput]:
        return [output(request, text, finish=finish("stop", len(text)))]

    with scripted(tmp_path, speak) as front:
        page = visit().open(f"http://127.0.0.1:{front.port}/")
        page.locator("#field-max_tokens").fill("8")
        page.get_by_label("Message", exact=True).fill("x")
        page.get_by_role("button", name="Send").click()
        answer = page.locator("article.assistant .text")
        expect(answer.locator("h1")).to_have_text("Title")
        expect(answer.locator("strong")).to_have_text("bold")
        expect(answer.locator("pre code")).to_have_text("<i>code</i>\n")
        expect(answer).to_contain_text("<b>tag</b>")
        link = answer.get_by_role("link")
        assert link.get_attribute("rel") == "noopener noreferrer"
        assert link.get_attribute("href") == "https://a.example/b"
