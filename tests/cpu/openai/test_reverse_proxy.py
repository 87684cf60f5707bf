"""A server behind nginx, with the configuration that docs/openai.md shows; nginx is Debian's."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.harness.http.http_front import Front, http_front
from tests.harness.http.tls import CERTIFICATE, FILES, KEY
from tests.harness.ring.fake_ring import WAIT_S, finish, output
from tests.harness.ring.launched import free_ports, wait_until
from tests.harness.sources import ROOT

NGINX = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin")
API_KEY = "k-1"

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed: apt-get install nginx"),
]

REST = """
pid {folder}/nginx.pid;
error_log {folder}/error.log;
daemon off;
worker_processes 1;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
{server}
}}
"""


def documented_server() -> str:
    (found,) = re.findall(r"```nginx\n(.*?)```", (ROOT / "docs" / "openai.md").read_text(), re.DOTALL)
    return str(found)


@contextmanager
def nginx(folder: Path, front: Front, *, keeps_prefix: bool) -> Iterator[str]:
    """Yield the address of an nginx in front of the server."""
    port = free_ports(1)
    upstream = front.config.http_url(front.port)
    server = documented_server()
    for documented, here in (
        ("listen 443 ssl", f"listen 127.0.0.1:{port} ssl"),
        ("/etc/ssl/llm.pem", str(CERTIFICATE)),
        ("/etc/ssl/llm.key", str(KEY)),
        ("http://127.0.0.1:30000/;", f"{upstream}{'' if keeps_prefix else '/'};"),
    ):
        assert server.count(documented) == 1, documented
        server = server.replace(documented, here)
    settings = folder / "nginx.conf"
    settings.write_text(REST.format(folder=folder, server=server))
    assert NGINX is not None
    process = subprocess.Popen(
        [NGINX, "-e", str(folder / "error.log"), "-p", str(folder), "-c", str(settings)]
    )
    address = f"https://127.0.0.1:{port}"
    try:
        wait_until(lambda: is_up(f"{address}/llm/live"), 5.0, "nginx answers")
        yield address
    finally:
        process.terminate()
        process.wait(WAIT_S)


def is_up(url: str) -> bool:
    try:
        return httpx.get(url, verify=False).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.parametrize("keeps_prefix", [False, True], ids=["prefix_taken_off", "prefix_kept"])
@pytest.mark.parametrize("upstream", [{}, FILES], ids=["http", "https"])
def test_streams_errors_and_departures_go_through_nginx(
    tmp_path: Path, upstream: dict[str, Any], keeps_prefix: bool
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with (
        http_front(run_dir, root_path="/llm", api_key=API_KEY, **upstream) as front,
        nginx(tmp_path, front, keeps_prefix=keeps_prefix) as address,
        ThreadPoolExecutor(1) as pool,
        httpx.Client(verify=False, timeout=WAIT_S) as http,
        openai.OpenAI(
            base_url=f"{address}/llm/v1", api_key=API_KEY, http_client=http, max_retries=0
        ) as client,
    ):
        call = pool.submit(client.completions.create, model="fake", prompt="x", max_tokens=5, stream=True)
        request = front.ring.wait_request()
        front.ring.send(output(request, "go "))
        stream = call.result(WAIT_S)
        # It comes before there is anything behind it: nothing on the way waits for more.
        assert next(stream).choices[0].text == "go "
        front.ring.send(output(request, "on", finish=finish("stop", 5)))
        assert "".join(event.choices[0].text for event in stream) == "on"

        call = pool.submit(client.completions.create, model="fake", prompt="x", max_tokens=5, stream=True)
        left = front.ring.wait_request(1)
        front.ring.send(output(left, "a"))
        call.result(WAIT_S).close()
        assert front.ring.wait_abort().handles == (left.handle,)

        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").models.list()
        assert [model.id for model in client.models.list()] == ["fake"]
        described = http.get(f"{address}/llm/openapi.json", headers={"Authorization": f"Bearer {API_KEY}"})
        assert json.loads(described.text)["servers"] == [{"url": "/llm"}]
