"""Long texts beside another thread: CPU time, the longest time for which that thread waited, and memory.

The other thread stands for the loop of a tokenizer or HTTP process, while a thread encodes. "in one piece" is
the library's own call. Use a machine with nothing else to do.
Run: python -m benchmarks.tokenizer.long_texts [--mib 8]
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.tokenizer.turns import DEMO_MODEL, cjk, emojis, marks, words
from runtime.text import tokenizer
from runtime.wire.format import IntArray
from tokenizer_proc.main import SWITCH_S

KINDS: dict[str, tuple[Callable[[int, int], str], int]] = {
    "words": (words, 1),
    "any kind": (marks, 1),
    "emojis": (emojis, 4),
    "CJK": (cjk, 3),
    "spaces": (lambda num_chars, _: " " * num_chars, 1),
}
"""Texts by name, and the bytes of a character."""
WATCH_S = 0.0005


class Watcher:
    """Thread that looks at the clock and at the resident memory."""

    def __init__(self) -> None:
        self.longest_s, self.most_bytes = 0.0, 0
        self._lock = threading.Lock()
        """Held while either figure is changed: reading the memory lets the other thread run."""
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def begin(self) -> None:
        time.sleep(0.05)
        with self._lock:
            self.longest_s, self.most_bytes = 0.0, resident_bytes()

    def _watch(self) -> None:
        before_s = time.perf_counter()
        while True:
            time.sleep(WATCH_S)
            now_s = time.perf_counter()
            with self._lock:
                self.longest_s = max(self.longest_s, now_s - before_s - WATCH_S)
                self.most_bytes = max(self.most_bytes, resident_bytes())
            before_s = now_s


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(name: str, watcher: Watcher, encode: Callable[[], list[IntArray]]) -> IntArray:
    watcher.begin()
    before, cpu_s = watcher.most_bytes, time.process_time()
    (ids,) = encode()
    cpu_s = time.process_time() - cpu_s
    longest_ms, mib = 1000 * watcher.longest_s, (watcher.most_bytes - before) / (1 << 20)
    print(f"| {name} | {len(ids)} | {cpu_s:.2f} | {longest_ms:.1f} | {mib:.0f} |", flush=True)
    return ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=8, help="size of each text")
    args = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    sys.setswitchinterval(SWITCH_S)
    loaded, watcher = tokenizer.load(DEMO_MODEL), Watcher()
    gc.collect()
    gc.freeze()  # as the processes do: a full collection of a vocabulary holds up all threads
    print("| text | tokens | CPU s | longest wait ms | memory MiB |\n|---|---|---|---|---|")
    for name, (kind, num_bytes) in KINDS.items():
        text = kind((args.mib << 20) // num_bytes, 1)
        in_parts = measure(name, watcher, partial(loaded.encode_batch, [text]))
        whole = measure(f"{name}, in one piece", watcher, partial(loaded._encode_whole, [text], True))
        if not np.array_equal(in_parts, whole):
            raise SystemExit(f"{name}: the ids differ")


if __name__ == "__main__":
    main()
