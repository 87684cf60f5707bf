"""A beam search of width 4 over 256 tokens through the Python interface of each engine, in turns.

One prompt of 64 tokens at a time; the tokens are those of the best hypothesis. vLLM's search is that of its
library, `LLM.beam_search`: requests for one token of each beam, in a loop. Engines are named as for
`benchmarks.cpu.offline`; all sleep but the one whose turn it is, and --stop NAME stops one that computes even
then.
Run: python -m benchmarks.cpu.beam_peers --model MODEL_DIR carousel=.venv/bin/python vllm=/path/to/python
"""

from __future__ import annotations

import json
import random
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.cpu.offline import DONE, READY, Engine, engine_parser, vocabulary_of

INPUT_LEN, OUTPUT_LEN, WIDTH = 64, 256, 4
Search = Callable[[list[int]], int]


def carousel_engine(model: str, length: int) -> Search:
    from carousel import LLM, SamplingParams

    llm = LLM(model, dtype="bfloat16", context_length=2048, max_running_requests=16, max_beam_width=WIDTH)
    params = SamplingParams(
        max_tokens=length, use_beam_search=True, beam_width=WIDTH, n=WIDTH, ignore_eos=True
    )

    def search(prompt: list[int]) -> int:
        completion = llm.generate(prompt, params, use_tqdm=False)
        assert not isinstance(completion, list)
        assert len(completion.outputs) == WIDTH
        return len(completion.token_ids)

    return search


def vllm_engine(model: str, length: int) -> Search:
    from vllm import LLM
    from vllm.sampling_params import BeamSearchParams

    llm = LLM(model, dtype="bfloat16", max_model_len=2048, max_num_seqs=16, enable_prefix_caching=True)
    params = BeamSearchParams(beam_width=WIDTH, max_tokens=length, ignore_eos=True)

    def search(prompt: list[int]) -> int:
        (output,) = llm.beam_search([{"prompt_token_ids": prompt}], params)
        assert len(output.sequences) == WIDTH
        return len(output.sequences[0].tokens) - len(prompt)

    return search


ENGINES = {"carousel": carousel_engine, "vllm": vllm_engine}


def serve(name: str, model: Path, length: int) -> None:
    """Answer turns: a line in is a round's number, a line out its tokens and seconds."""
    vocabulary = vocabulary_of(model)
    search = ENGINES[name](str(model), length)
    print(READY, flush=True)
    for line in sys.stdin:
        prompt = random.Random(line).choices(vocabulary, k=INPUT_LEN)
        began = time.perf_counter()
        num_tokens = search(prompt)
        print(DONE, num_tokens, time.perf_counter() - began, flush=True)


def main() -> None:
    parser = engine_parser(__doc__, rounds=5)
    parser.add_argument("--length", type=int, default=OUTPUT_LEN)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.model, args.length)
        return
    serving = ["-m", "benchmarks.cpu.beam_peers", "--model", str(args.model), "--length", str(args.length)]
    engines = [
        Engine(
            name,
            [*shlex.split(command), *serving, "--serve", name],
            is_stopped_between=name in args.stop,
        )
        for name, _, command in args.engines
    ]
    runs = [
        {engine.name: engine.run(str(number), args.length) for engine in engines}
        for number in range(args.rounds + 1)
    ]
    del runs[0]
    for engine in engines:
        engine.close()
        for figure in ("tokens_per_s", "cpu_s", "others_cores"):
            values = [run[engine.name][figure] for run in runs]
            print(
                f"{engine.name:<10} {figure:<13} {statistics.median(values):10.2f}  "
                f"[{min(values):.2f} - {max(values):.2f}]"
            )
    first, *others = [engine.name for engine in engines]
    for other in others:
        ratios = [run[first]["tokens_per_s"] / run[other]["tokens_per_s"] for run in runs]
        print(f"{first} has {statistics.median(ratios):.2f} of the tokens/s of {other}")
    print(json.dumps(runs))


if __name__ == "__main__":
    main()
