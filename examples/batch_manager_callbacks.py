"""Serve through callbacks alone, as an inference server hosts TensorRT-LLM's batch manager.

python examples/batch_manager_callbacks.py                 # starts a runtime with the demo model
python examples/batch_manager_callbacks.py --run-dir DIR   # uses the one that launch.py has started there
"""

from __future__ import annotations

import argparse
import json
import queue
import threading
from typing import Any

import numpy as np

from carousel import BatchManager, GenerationExecutor, InferenceRequest


class Server:
    """Work items that wait, and those that a response is to come for."""

    def __init__(self) -> None:
        self.waiting: queue.SimpleQueue[InferenceRequest] = queue.SimpleQueue()
        self.finished: dict[int, threading.Event] = {}
        self.num_iterations = 0

    def ask(self, request_id: int, prompt: list[int], num_tokens: int, *, streaming: bool = False) -> None:
        self.finished[request_id] = threading.Event()
        inputs = {
            "input_ids": np.array([prompt], np.int32),
            "request_output_len": np.array([num_tokens], np.int32),
            "streaming": np.array([streaming]),
            "return_log_probs": np.array([True]),
        }
        self.waiting.put(InferenceRequest(request_id, inputs))

    def get_inference_requests(self, max_num_requests: int) -> list[InferenceRequest]:
        requests: list[InferenceRequest] = []
        while not self.waiting.empty() and len(requests) != max_num_requests:
            requests.append(self.waiting.get())
        return requests

    def send_response(self, request_id: int, tensors: list[Any], is_final: bool, error: str) -> None:
        if error:
            print(f"request {request_id} failed: {error}")
        else:
            named = dict(tensors)
            num_tokens = named["sequence_length"].item()
            ids = named["output_ids"][0, 0].tolist()
            print(f"request {request_id}: {num_tokens} tokens by now, {ids}{' final' if is_final else ''}")
        if is_final:
            self.finished[request_id].set()

    def return_stats(self, stats: str) -> None:
        self.num_iterations = json.loads(stats)["Iteration Counter"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine-dir", help="directory of a model; default: the demo model")
    parser.add_argument("--run-dir", help="run directory of a runtime that is already running")
    args = parser.parse_args()

    server = Server()
    with (
        GenerationExecutor.create(engine_dir=args.engine_dir, run_dir=args.run_dir) as executor,
        BatchManager(
            executor, server.get_inference_requests, server.send_response, return_stats=server.return_stats
        ),
    ):
        server.ask(1, [1, 300, 301], 8)
        server.ask((1 << 64) - 1, [1, 400], 8, streaming=True)
        server.ask(3, [], 8)
        for finished in server.finished.values():
            finished.wait()
    print(f"{server.num_iterations} iterations with work")


if __name__ == "__main__":
    main()
