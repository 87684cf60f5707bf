"""Enqueue now, await responses later: several sequences of one prompt, each with its own results.

python examples/executor_responses.py                 # starts a runtime with the demo model
python examples/executor_responses.py --run-dir DIR   # uses the one that launch.py has started there
"""

from __future__ import annotations

import argparse

from carousel import GenerationExecutor, GenerationRequest, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine-dir", help="directory of a model; default: the demo model")
    parser.add_argument("--run-dir", help="run directory of a runtime that is already running")
    args = parser.parse_args()

    three_sequences = SamplingParams(n=3, max_tokens=16, temperature=0.8, seed=1)
    with GenerationExecutor.create(engine_dir=args.engine_dir, run_dir=args.run_dir) as executor:
        ids = executor.enqueue_requests(
            [
                GenerationRequest([1, 300, 301], three_sequences, streaming=True, client_id=7),
                GenerationRequest([1, 400], SamplingParams(max_tokens=16), client_id=8),
            ]
        )
        unfinished = set(ids)
        while unfinished:
            for response in executor.await_responses(timeout=1.0):
                if response.has_error():
                    print(f"request {response.request_id} failed: {response.error_msg}")
                else:
                    result = response.result
                    print(
                        f"client {response.client_id} request {response.request_id}"
                        f" sequence {result.sequence_index}: {result.output_token_ids[0]}"
                        f"{' sequence final' if result.is_sequence_final else ''}"
                        f"{' final' if result.is_final else ''}"
                    )
                if response.is_final:
                    unfinished.discard(response.request_id)


if __name__ == "__main__":
    main()
