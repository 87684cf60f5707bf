"""Decoding with LoRA adapters through the Python interface of each engine, in turns.

Eight prompts of 16 tokens to 64 new ones each: of the base model (none), all with one adapter (one), each
with an adapter of its own (each); and of the base model by an engine that takes no adapters (off). Adapters
have rank 16 on all linear layers and random weights, which are made here. Engines are named as for
`benchmarks.cpu.offline`; all sleep but the one whose turn it is, and --stop NAME stops one that computes even
then.
Run: python -m benchmarks.cpu.lora_offline --model MODEL_DIR carousel=.venv/bin/python vllm=/path/to/python
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.cpu.offline import DONE, READY, Engine, engine_parser, vocabulary_of

NUM_PROMPTS, INPUT_LEN, OUTPUT_LEN, RANK = 8, 16, 64, 16
Generate = Callable[[list[list[int]], list[Path]], int]
KINDS = ("off", "none", "one", "each")


def carousel_engine(model: str, *, takes_adapters: bool) -> Generate:
    from carousel import LLM, LoRARequest, SamplingParams

    lora = {"enable_lora": True, "max_loras": NUM_PROMPTS, "max_lora_rank": RANK} if takes_adapters else {}
    llm = LLM(model, dtype="bfloat16", context_length=2048, max_running_requests=NUM_PROMPTS, **lora)
    params = SamplingParams(max_tokens=OUTPUT_LEN, temperature=0.0, ignore_eos=True)

    def generate(prompts: list[list[int]], adapters: list[Path]) -> int:
        requests = [LoRARequest(path.name, _number(path), str(path)) for path in adapters]
        completions = llm.generate(prompts, params, use_tqdm=False, lora_request=requests or None)
        assert isinstance(completions, list)
        return sum(len(completion.token_ids) for completion in completions)

    return generate


def vllm_engine(model: str, *, takes_adapters: bool) -> Generate:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    lora = {"enable_lora": True, "max_loras": NUM_PROMPTS, "max_lora_rank": RANK} if takes_adapters else {}
    llm = LLM(model, dtype="bfloat16", max_model_len=2048, max_num_seqs=NUM_PROMPTS, **lora)
    params = SamplingParams(max_tokens=OUTPUT_LEN, temperature=0.0, ignore_eos=True)

    def generate(prompts: list[list[int]], adapters: list[Path]) -> int:
        requests = [LoRARequest(path.name, _number(path), str(path)) for path in adapters]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(inputs, params, use_tqdm=False, lora_request=requests or None)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return generate


ENGINES = {"carousel": carousel_engine, "vllm": vllm_engine}


def _number(adapter: Path) -> int:
    return int(adapter.name.removeprefix("a"))


def serve(name: str, model: Path, adapters: Path | None) -> None:
    """Answer turns: a line in is a kind and a round's number, a line out its tokens and seconds."""
    vocabulary = vocabulary_of(model)
    generate = ENGINES[name](str(model), takes_adapters=adapters is not None)
    paths = [] if adapters is None else sorted(adapters.iterdir())
    print(READY, flush=True)
    for line in sys.stdin:
        kind, number = line.split()
        draw = random.Random(number)
        prompts = [draw.choices(vocabulary, k=INPUT_LEN) for _ in range(NUM_PROMPTS)]
        chosen = {"one": paths[:1] * NUM_PROMPTS, "each": paths}.get(kind, [])
        began = time.perf_counter()
        num_tokens = generate(prompts, chosen)
        print(DONE, num_tokens, time.perf_counter() - began, flush=True)


def make_adapters(folder: Path, model: Path) -> None:
    """Write NUM_PROMPTS adapters of random weights for a Llama or Qwen2 model, as PEFT does."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    sizes = {
        "self_attn.q_proj": (hidden, q),
        "self_attn.k_proj": (hidden, kv),
        "self_attn.v_proj": (hidden, kv),
        "self_attn.o_proj": (q, hidden),
        "mlp.gate_proj": (hidden, wide),
        "mlp.up_proj": (hidden, wide),
        "mlp.down_proj": (wide, hidden),
    }
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "bias": "none",
        "target_modules": sorted(name.rpartition(".")[2] for name in sizes),
    }
    for number in range(1, NUM_PROMPTS + 1):
        generator = torch.Generator().manual_seed(number)
        tensors = {}
        for layer in range(config["num_hidden_layers"]):
            for name, (num_in, num_out) in sizes.items():
                start = f"base_model.model.model.layers.{layer}.{name}"
                tensors[f"{start}.lora_A.weight"] = torch.randn(RANK, num_in, generator=generator) * 0.02
                tensors[f"{start}.lora_B.weight"] = torch.randn(num_out, RANK, generator=generator) * 0.02
        path = folder / f"a{number}"
        path.mkdir()
        save_file(tensors, path / "adapter_model.safetensors")
        (path / "adapter_config.json").write_text(json.dumps(settings))


def main() -> None:
    parser = engine_parser(__doc__, rounds=9)
    parser.add_argument("--adapters", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.model, args.adapters)
        return
    with tempfile.TemporaryDirectory() as folder:
        make_adapters(Path(folder), args.model)
        measure(args, folder)


def measure(args: argparse.Namespace, adapters: str) -> None:
    """Run all kinds on all engines in turns; print milliseconds a step and their ratio to `off`."""
    serving = ["-m", "benchmarks.cpu.lora_offline", "--model", str(args.model), "--serve"]
    off, on = {}, {}
    for name, _, text in args.engines:
        command, is_stopped = [*shlex.split(text), *serving, name], name in args.stop
        off[name] = Engine(name, command, is_stopped_between=is_stopped)
        on[name] = Engine(name, [*command, "--adapters", adapters], is_stopped_between=is_stopped)
    runs = []
    for number in range(args.rounds + 1):
        of_kinds: dict[str, dict[str, float]] = {}
        for name in off:
            for kind in KINDS:
                engine = off[name] if kind == "off" else on[name]
                run = engine.run(f"{kind} {number}", NUM_PROMPTS * OUTPUT_LEN)
                of_kinds[f"{name} {kind}"] = run
        runs.append(of_kinds)
    del runs[0]
    for engine in [*off.values(), *on.values()]:
        engine.close()
    for name in off:
        bases = [run[f"{name} off"]["tokens_per_s"] for run in runs]
        for kind in KINDS:
            rates = [run[f"{name} {kind}"]["tokens_per_s"] for run in runs]
            times = [base / rate for base, rate in zip(bases, rates, strict=True)]
            print(
                f"{name:<10} {kind:<5} {statistics.median(rates):8.1f} tokens/s "
                f"[{min(rates):.1f} - {max(rates):.1f}]  {statistics.median(times):.3f} of the time of off"
            )
    print(json.dumps(runs))


if __name__ == "__main__":
    main()
