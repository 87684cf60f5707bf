"""Cost of a beam search beside that of as many sampling rows, and of the same search made by a client.

    python -m benchmarks.cpu.beams [--vocab 151936] [--width 4] [--length 64] [--rounds 3]

A launch with the shape of a 0.5B model and dummy weights. Printed are milliseconds of a step, in turns:
a search; one with a repetition penalty and n-grams; as many sequences that are sampled; and a search
whose client asks for one token of each beam with its logprobs, in a loop, as a server without searches
has it done. The ratios are medians of the rounds'.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import msgspec

from benchmarks.cpu.guided import made_model
from carousel import LLM, SamplingParams

PROMPT = list(range(7, 71))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    width, length = args.width, args.length
    search = SamplingParams(max_tokens=length, n=1, use_beam_search=True, beam_width=width, ignore_eos=True)
    ruled = msgspec.structs.replace(search, repetition_penalty=1.2, no_repeat_ngram_size=3)
    sample = SamplingParams(max_tokens=length, n=width, temperature=1.0, seed=1, ignore_eos=True)
    one = SamplingParams(max_tokens=1, temperature=0.0, logprobs=2 * width, ignore_eos=True)
    with (
        made_model(args.vocab) as folder,
        LLM(
            str(folder),
            load_format="dummy",
            dtype="bfloat16",
            max_beam_width=width,
            context_length=2048,
            max_running_requests=max(16, width),
        ) as llm,
    ):

        def by_its_client() -> None:
            beams: list[tuple[float, list[int]]] = [(0.0, [])]
            for _ in range(length):
                answers = llm.generate([PROMPT + ids for _, ids in beams], [one] * len(beams), use_tqdm=False)
                candidates = [
                    (total + logprob, [*ids, token])
                    for (total, ids), answer in zip(beams, answers, strict=True)
                    for token, logprob in answer.outputs[0].logprobs[0].top
                ]
                beams = sorted(candidates, reverse=True)[:width]

        ways: dict[str, Callable[[], object]] = {
            "search": lambda: llm.generate(PROMPT, search),
            "with rules": lambda: llm.generate(PROMPT, ruled),
            "sampled": lambda: llm.generate(PROMPT, sample),
            "by its client": by_its_client,
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(args.rounds + 1):
            for name, way in ways.items():
                began = time.perf_counter()
                way()
                if number:  # the first round warms up
                    times[name].append((time.perf_counter() - began) / length * 1e3)
    for name, each in times.items():
        ratios = [own / search for own, search in zip(each, times["search"], strict=True)]
        took = statistics.median(each)
        print(f"{name:15} {took:7.1f} ms a step, {statistics.median(ratios):5.2f} of a search")


if __name__ == "__main__":
    main()
