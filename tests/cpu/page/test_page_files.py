"""The page's files over HTTP: who gets them, by which paths, with which headers, and what is in them."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from carousel.server.web.page import FOLDER, INDEX, page_files, security_policy
from tests.harness.http.http_front import Front, http_front
from tests.harness.ring.fake_ring import spell

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
VENDOR = FOLDER / "vendor"


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with http_front(tmp_path_factory.mktemp("run"), spell("abc")) as front:
        yield front


def page(front: Front, path: str = "/", **headers: str) -> httpx.Response:
    return front.http.get(path, headers={"Accept": BROWSER, **headers})


def test_a_browser_gets_the_page_and_all_else_an_index(front: Front) -> None:
    answer = page(front)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "<title>Carousel</title>" in answer.text
    for accept in ("*/*", "application/json"):
        body = page(front, Accept=accept).json()
        assert (body["name"], body["models"], body["page"]) == ("carousel", ["fake"], True)
    assert front.http.post("/").status_code == 405
    head = front.http.head("/", headers={"Accept": BROWSER})
    assert (head.status_code, head.content) == (200, b"")


def test_every_file_comes_once_and_then_when_it_has_changed(front: Front) -> None:
    for name, file in page_files().items():
        if name == INDEX:
            assert page(front, f"/page/{name}").status_code == 404
            continue
        plain = page(front, f"/page/{name}", **{"Accept-Encoding": "identity"})
        assert plain.content == file.content
        assert plain.headers["content-type"].startswith(file.media_type)
        assert plain.headers["x-content-type-options"] == "nosniff"
        packed = page(front, f"/page/{name}")
        assert packed.headers["content-encoding"] == "gzip"
        assert packed.content == file.content
        again = page(front, f"/page/{name}", **{"If-None-Match": packed.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    for path in ("/page/", "/page/none.js", "/page/../page.py", "/page/%2e%2e/page.py", "/page/vendor"):
        assert page(front, path).status_code == 404


def test_files_need_no_key_and_all_else_does(front: Front, tmp_path: Path) -> None:
    with http_front(tmp_path, spell("abc"), api_key="secret") as keyed:
        assert 'name="needs-key" content="yes"' in page(keyed).text
        assert page(keyed, "/page/app.js").status_code == 200
        for path in ("/page/none.js", "/snapshot", "/stats", "/v1/models", "/openapi.json"):
            assert page(keyed, path).status_code == 401
        assert keyed.http.get("/").status_code == 401
        assert keyed.http.get("/", headers={"Authorization": "Bearer secret"}).json()["name"] == "carousel"
    assert 'name="needs-key" content="no"' in page(front).text


def test_without_a_page_browsers_get_the_index(tmp_path: Path) -> None:
    with http_front(tmp_path, spell("abc"), no_page=True) as bare:
        assert page(bare).json()["page"] is False
        assert page(bare, "/page/app.js").status_code == 404


def test_it_is_served_below_the_root_path_and_names_no_path_from_the_top(tmp_path: Path) -> None:
    with http_front(tmp_path, spell("abc"), root_path="/llm") as rooted:
        for path in ("/llm/", "/"):
            assert "<title>Carousel</title>" in page(rooted, path).text
        for path in ("/llm/page/app.js", "/page/app.js"):
            assert page(rooted, path).status_code == 200
    own = [file for file in FOLDER.iterdir() if file.suffix in (".js", ".html", ".css")]
    assert len(own) > 10
    absolute = re.compile(r"""(?:src|href)="/|["'`]/(?:page|v1)/|url\(["']?/""")
    assert not [file.name for file in own if absolute.search(file.read_text())]


def test_the_policy_lets_in_nothing_but_the_servers_own_files(front: Front) -> None:
    policy = page(front).headers["content-security-policy"]
    assert policy == page(front, "/page/app.js").headers["content-security-policy"]
    assert policy == security_policy((FOLDER / INDEX).read_bytes())
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'"
    assert rules["connect-src"] == "'self'"
    assert re.fullmatch(r"'self' 'sha256-[\w+/]{43}='", rules["script-src"])
    assert "unsafe" not in policy
    assert "http" not in policy


def test_files_of_others_are_those_that_were_taken_over() -> None:
    """A change to one is made upstream, or is told in versions.json together with its new checksum."""
    told = json.loads((VENDOR / "versions.json").read_text())
    found = {path.name: path for path in VENDOR.iterdir() if path.name != "versions.json"}
    assert found.keys() == told.keys()
    for name, path in found.items():
        assert hashlib.sha256(path.read_bytes()).hexdigest() == told[name]["sha256"], name
        assert all(told[name][field] for field in ("package", "version", "licence", "source"))
    packages = {each["package"] for each in told.values()}
    assert packages == {"preact", "htm", "uplot", "marked", "dompurify"}
    assert {f"{package}.LICENSE" for package in packages} <= found.keys()


def test_all_of_it_is_small_on_the_wire() -> None:
    total = sum(len(file.packed) for name, file in page_files().items() if not name.endswith(".LICENSE"))
    assert total < 150 << 10
    file = page_files()[INDEX]
    assert gzip.decompress(file.packed) == file.content


def test_what_the_page_imports_is_there() -> None:
    index = (FOLDER / INDEX).read_text()
    (mapped,) = re.findall(r'<script type="importmap">(.*?)</script>', index, re.DOTALL)
    bare = json.loads(mapped)["imports"]
    files = page_files()
    for path in (*re.findall(r'(?:href|src)="(page/[^"]+)"', index), *bare.values()):
        assert path.removeprefix("./").removeprefix("page/") in files
    for path in FOLDER.glob("*.js"):
        for name in re.findall(r'(?:from|import\()\s*"([^"]+)"', path.read_text()):
            assert name in bare or name.removeprefix("./") in files, f"{path.name} imports {name}"


def test_the_description_of_the_api_comes_packed_to_those_who_take_it(front: Front) -> None:
    plain = page(front, "/openapi.json", **{"Accept-Encoding": "identity"})
    packed = page(front, "/openapi.json")
    assert "content-encoding" not in plain.headers
    assert packed.headers["content-encoding"] == "gzip"
    assert packed.json() == plain.json()
    assert int(packed.headers["content-length"]) < len(plain.content) / 10
