"""TensorRT-LLM's executor examples, on Carousel: one prompt, a stream, a batch, and a time limit.

python examples/executor_generate.py                     # the demo model
python examples/executor_generate.py --engine-dir DIR    # another one
"""

from __future__ import annotations

import argparse

from transformers import PreTrainedTokenizerFast  # AutoTokenizer would import torch, which takes seconds

from carousel import GenerationExecutor, SamplingParams

PROMPTS = ["def fibonacci(n):\n", "class Stack:\n", "import os\n", "for line in"]


def generate_one(
    executor: GenerationExecutor, prompt_token_ids: list[int], sampling_params: SamplingParams
) -> None:
    result = executor.generate_async(
        prompt_token_ids=prompt_token_ids,
        sampling_params=sampling_params,
    )
    output = result.result()  # blocks
    print("Generated:", output.text)


def stream_one(
    executor: GenerationExecutor, prompt_token_ids: list[int], sampling_params: SamplingParams
) -> None:
    result = executor.generate_async(
        prompt_token_ids=prompt_token_ids,
        sampling_params=sampling_params,
        streaming=True,
    )
    print("Streaming: ", end="")
    for output in result:
        print(output.text_diff, end="", flush=True)
    print()


def generate_batch(executor: GenerationExecutor, prompt_token_ids_list: list[list[int]]) -> None:
    sampling_params_list = [
        SamplingParams(max_tokens=50, temperature=0.7),
        SamplingParams(max_tokens=100, temperature=0.9),
        SamplingParams(max_tokens=80, temperature=0.8),
    ]
    results = executor.generate(
        prompt_token_ids=prompt_token_ids_list,
        sampling_params=sampling_params_list,
    )
    for i, result in enumerate(results):
        print(f"Result {i}: {result.result().text}")


def generate_within(executor: GenerationExecutor, prompt_token_ids: list[int], timeout: float) -> None:
    result = executor.generate_async(prompt_token_ids, SamplingParams(max_tokens=2000, ignore_eos=True))
    try:
        output = result.result(timeout=timeout)
        print("In time:", len(output.token_ids), "tokens")
    except TimeoutError:
        executor.abort_request(result.request.id)
        print("Timed out:", len(result.result().token_ids), "tokens")

    stats = executor.get_latest_stats()
    if stats is not None:
        print(f"Active requests: {stats.num_active_requests}")
        print(f"Queued requests: {stats.num_queued_requests}")
        print(f"Batch size: {stats.current_batch_size}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine-dir", help="directory of a model in Hugging Face format; default: the demo")
    parser.add_argument("--tokenizer-dir", help="default: the model's")
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds for the last example")
    args = parser.parse_args()

    executor = GenerationExecutor.create(
        engine_dir=args.engine_dir,
        tokenizer_dir=args.tokenizer_dir,
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.tokenizer_dir or executor.config.model)
    prompt_token_ids, *others = (tokenizer.encode(prompt) for prompt in PROMPTS)
    sampling_params = SamplingParams(
        max_tokens=100,
        temperature=0.8,
        top_p=0.95,
    )
    generate_one(executor, prompt_token_ids, sampling_params)
    stream_one(executor, prompt_token_ids, sampling_params)
    generate_batch(executor, others)
    generate_within(executor, prompt_token_ids, args.timeout)
    executor.shutdown()


if __name__ == "__main__":
    main()
