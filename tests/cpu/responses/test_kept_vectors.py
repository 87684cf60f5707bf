"""Vectors of requests with many texts: those that are kept until the last has come are bounded."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from carousel.server.vectors import vector_room
from runtime.wire.messages import GenerateRequest, SequenceOutput, TensorBatch, TensorEntry
from tests.harness.http.http_front import Front, http_front
from tests.harness.ring.fake_ring import WAIT_S, finish, output

NUM_TEXTS, NUM_REQUESTS, NUM_VECTORS, WIDTH = 40, 3, 50, 64
TEXTS = ["x"] * NUM_TEXTS
BODIES: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": TEXTS},
    "/v1/rerank": {"query": "x", "documents": TEXTS[1:]},
    "/v1/score": {"text_1": "x", "text_2": TEXTS[1:]},
}


def send_vector(front: Front, request: GenerateRequest) -> None:
    entry = TensorEntry(request.handle, "embedding", "float32", (1, WIDTH), 0)
    front.ring.send_message(TensorBatch((entry,)), [np.ones(WIDTH, np.float32).tobytes()])
    front.ring.send(output(request, "", token_ids=b"", finish=finish("stop", 0)))


@pytest.mark.parametrize("path", BODIES)
def test_texts_are_sent_as_there_is_room_for_their_vectors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Each request kept all of its vectors, and there could be any number of them."""
    monkeypatch.setattr(vector_room, "FIRST_VECTOR_BYTES", 4 * WIDTH)
    monkeypatch.setattr(vector_room.VectorRoom.__init__, "__defaults__", (NUM_VECTORS * 4 * WIDTH,))
    asked: list[GenerateRequest] = []

    def keep(request: GenerateRequest) -> list[SequenceOutput]:
        asked.append(request)
        return []

    def wait_for(count: int) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while len(asked) < count:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)

    with http_front(tmp_path, keep, task="embed") as front, ThreadPoolExecutor(NUM_REQUESTS) as callers:
        answers = [callers.submit(front.post, path, **BODIES[path]) for _ in range(NUM_REQUESTS)]
        wait_for(NUM_VECTORS)
        time.sleep(0.1)
        # The oldest request needs no room, and others may have taken some before its last text was sent.
        assert NUM_VECTORS <= len(asked) < NUM_VECTORS + NUM_TEXTS, "others wait, and are not refused"
        num_sent = 0
        while num_sent < NUM_REQUESTS * NUM_TEXTS:
            wait_for(num_sent + 1)
            send_vector(front, asked[num_sent])
            num_sent += 1
        for answer in answers:
            response = answer.result(WAIT_S)
            assert response.status_code == 200, response.text
            assert len(json.loads(response.content)) > 1
