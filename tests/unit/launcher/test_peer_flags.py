"""Flags of vLLM, SGLang and trtllm-serve: understood, taken with a line, or refused with the reason."""

from __future__ import annotations

import re
import shlex

import pytest

from runtime.base.errors import ConfigError
from runtime.launcher.command_line import make_parser, option_names, parse_args, parse_command_line
from runtime.sampling.table import MAX_LOGPROBS
from runtime.settings.config import SETTINGS, RuntimeConfig, flags_of, from_values
from runtime.settings.keywords import flags_of_keywords
from runtime.settings.peer_families import PEER_FAMILIES, family_reason
from runtime.settings.peer_flag import Meaning, PeerFlag
from runtime.settings.peer_flags import (
    MAX_DETOKENIZERS,
    NEUTRAL_VALUES,
    PEER_FLAGS,
    REFUSED_VALUES,
    VALUES,
    peer_flag,
)
from scheduler_proc.features.speculation.ngram_index import MAX_NGRAM
from tests.harness.cases import for_each
from tests.harness.sources import ROOT

# As they stand in scripts: of a spelling, the setting that it becomes, or the words of its line or refusal.
UNDERSTOOD = """
--host 0.0.0.0 | host = 0.0.0.0
--dtype bfloat16 | dtype = bfloat16
--max-model-len 1024 | context_length = 1024
--max-model-len 1k | context_length = 1000
--gpu-memory-utilization 0.5 | mem_fraction_static = 0.5
--tensor-parallel-size 2 | tp_size = 2
-tp 2 | tp_size = 2
--max-num-seqs 16 | max_running_requests = 16
--max-num-batched-tokens 512 | chunked_prefill_size = 512
--served-model-name a | served_model_name = a
--lora-modules a=x b=y | lora_modules = a=x,b=y
--lora-paths a=x | lora_modules = a=x
--lora-modules '{"name": "a", "path": "x", "base_model_name": "m"}' b=y | lora_modules = a=x,b=y
--lora-modules '[{"name": "a", "path": "x"}, "b=y"]' | lora_modules = a=x,b=y
--lora-paths '{"lora_name": "a", "lora_path": "x"}' | lora_modules = a=x
--enable-lora | enable_lora = True
--max-loras-per-batch 2 | max_loras = 2
--served-model-name a b | served_model_name = a,b
--enforce-eager | disable_cuda_graph = True
--enable-prefix-caching | disable_radix_cache = False
--no-enable-prefix-caching | disable_radix_cache = True
--kv-cache-dtype auto | kv_cache_dtype = auto
--kv-cache-dtype fp8 | kv_cache_dtype = fp8_e4m3
--download-dir /tmp | download_dir = /tmp
--enable-chunked-prefill | disable_chunked_prefill = False
--root-path /x | root_path = /x
--ssl-keyfile k.pem | ssl_keyfile = k.pem
--load-format auto | load_format = auto
--disable-log-stats | decode_log_interval = 1048576
--uvicorn-log-level warning | log_level_http = warning
--api-key k | api_key = k
--generation-config vllm | sampling_defaults = openai
-q int8 | quantization = int8
-asc 2 | api_workers = 2
--kv_cache_free_gpu_memory_fraction 0.5 | mem_fraction_static = 0.5
--free_gpu_memory_fraction 0.5 | mem_fraction_static = 0.5
--tool_parser qwen3 | tool_call_parser = qwen3
--num_postprocess_workers 2 | detokenizer_workers = 2
--num_postprocess_workers 0 | detokenizer_workers = 1
--attention-backend FLASHINFER | attention_backend = flashinfer
--chat-template /tmp/x.jinja | chat_template = /tmp/x.jinja
--block-size 32 | page_size = 32
--shutdown-timeout 5 | drain_timeout = 5.0
--task generate | task = generate
--runner generate | task = generate
--allowed-origins '["*"]' | cors_origins = *
--scheduling-policy priority | schedule_policy = priority
--api-server-count 2 | api_workers = 2
--skip-tokenizer-init | skip_tokenizer_init = True
--guided-decoding-backend guidance | grammar_backend = llguidance
--grammar-backend none | grammar_backend = none
--grammar-backend xgrammar | grammar_backend = xgrammar
--model-impl transformers | model_impl = transformers
--model-path /nonexistent | model = /nonexistent
--tp 4 | tp_size = 4
--tp-size 4 | tp_size = 4
--pp-size 4 | pp_size = 4
--pipeline-parallel-size 2 | pp_size = 2
--mem-fraction-static 0.5 | mem_fraction_static = 0.5
--context-length 1024 | context_length = 1024
--max-running-requests 8 | max_running_requests = 8
--max-total-tokens 4096 | max_total_tokens = 4096
--chunked-prefill-size 512 | chunked_prefill_size = 512
--schedule-policy lpm | schedule_policy = lpm
--schedule-conservativeness 1.5 | schedule_conservativeness = 1.5
--disable-radix-cache | disable_radix_cache = True
--disable-cuda-graph | disable_cuda_graph = True
--cuda-graph-max-bs 8 | cuda_graph_max_bs = 8
--log-level debug | log_level = debug
--log-level-http warning | log_level_http = warning
--attention-backend torch_native | attention_backend = torch_native
--enable-mixed-chunk | batching_type = inflight_fused
--disable-overlap-schedule | disable_overlap_schedule = True
--watchdog-timeout 400 | step_timeout = 400.0
--page-size 8 | page_size = 8
--device cpu | device = cpu
--decode-log-interval 10 | decode_log_interval = 10
--tokenizer-worker-num 2 | tokenizer_workers = 2
--is-embedding | task = embed
--revision main | revision = main
--speculative-algorithm NGRAM | speculative_algorithm = NGRAM
--speculative-num-draft-tokens 7 | speculative_num_draft_tokens = 7
--num-speculative-tokens 7 | speculative_num_draft_tokens = 7
--speculative-config '{"method": "ngram"}' | speculative_algorithm = NGRAM
--speculative-config '{"method": "ngram", "num_speculative_tokens": 7}' | speculative_num_draft_tokens = 7
--speculative-config '{"model": "[ngram]", "prompt_lookup_max": 4}' | speculative_algorithm = NGRAM
"""
BEFORE = {
    "--num_postprocess_workers 0": "--detokenizer-workers 2",
    "--enable-prefix-caching": "--disable-radix-cache",
    "--kv-cache-dtype auto": "--kv-cache-dtype fp8",
    "--enable-chunked-prefill": "--disable-chunked-prefill",
    "--load-format auto": "--load-format dummy",
    "--task generate": "--task embed",
    "--runner generate": "--task embed",
    "--enable-mixed-chunk": "--batching-type static",
}
"""Flags before a line that asks for the default, so that it has something to change."""
TAKEN = """
--trust-remote-code | code of a model's repository is never run
--seed 1 | a request's own seed decides
--tokenizer-mode auto | tokenizers library
--disable-log-requests | not logged
--no-enable-log-requests | off is what it is anyway
--max-logprobs 20 | 20 log-probabilities
--enable-prompt-tokens-details | usage always says
--swap-space 4 | nothing is swapped
--cpu-offload-gb 0 | weights stay on their device
--data-parallel-size 1 | one engine
--max-prefill-tokens 4096 | --chunked-prefill-size
--random-seed 1 | a request's own seed decides
--enable-metrics | /metrics is always there
--max-seq-len-to-capture 8192 | sequences of any length
--sampling-backend pytorch | the result is the same
--dp 1 | one engine
--skip-server-warmup | no request is made to warm up
--enable-cache-report | usage always says
--enable-auto-tool-choice | wherever --tool-call-parser reads calls
--backend pytorch | computed by Carousel itself
--logprobs-mode raw_logprobs | those of the raw logits
--enable-request-id-headers | every answer has X-Request-Id
--language-model-only | served for text only
--sleep-on-idle | sleeps until a message comes
--enable-reasoning | wherever --reasoning-parser knows it
"""
REFUSED = """
--rope-theta 10000 | give it as rope_theta in --hf-overrides
--quantization fp8 | recognised without it; leave it out
--tool-parser-plugin x.py | parsers are those of --tool-call-parser
--tool-server demo | tools are called by the client
--enable-lora-bias | adapters with biases are refused
--lora-dtype float32 | adapters are of the model's dtype
--chunked-prefill-size -1 | --disable-chunked-prefill computes prompts whole
--log-requests | never logged; --log-level info
--grammar-backend outlines | give llguidance
--speculative-config '{"method": "eagle", "model": "a/b"}' | draft models are not built
--speculative-config '{"method": "ngram", "num_speculative_tokens": 0}' | a whole number from 1 on, got 0
--speculative-config '{"method": "ngram", "quantization": "fp8"}' | quantization is unknown with method ngram
--speculative-algorithm EAGLE | draft models are not built
--hicache-ratio 2 | a KV cache is its server's alone
--speculative-ngram-max-trie-depth 4 | NGRAM looks for the longest match
--speculative-token-map x | draft models are not built
--moe-a2a-backend deepep | --tp-size divides the experts
--moe-runner-backend triton | kernels are chosen by the device
--data-parallel-size-local 1 | start several servers
--cuda-graph-sizes 1 2 | --cudagraph-capture-sizes lists the sizes
--cuda-graph-backend-decode full | decode steps are recorded as
--no-enable-eplb | off is what it is anyway; leave it out
--disable-priority-preemption | fcfs takes none
--extra_llm_api_options x.yaml | in a file of options in YAML, --config FILE
--server_role CONTEXT | one server computes prompts and outputs
--max_input_len 100 | --max-model-len bounds prompt and output
--backend tensorrt | there are no TensorRT engines
--num_postprocess_workers 65 | expected a whole number up to 64
--attention-backend fa3 | the device's own is chosen
--logprobs-mode processed_logprobs | those of the raw logits; leave it out
--speculative-draft-model-path a/b | draft models are not built
"""


def cases(table: str) -> list[tuple[str, str]]:
    rows = [line.split(" | ") for line in table.strip().splitlines()]
    return [(line, expected) for line, expected in rows]


@for_each(("line", "expected"), cases(UNDERSTOOD))
def test_what_has_a_setting_here_becomes_it(line: str, expected: str) -> None:
    name, _, value = expected.partition(" = ")
    before = shlex.split(BEFORE.get(line, ""))
    assert str(getattr(parse_args(before), name)) != value
    config, notes = parse_command_line(before + shlex.split(line))
    assert str(getattr(config, name)) == value
    assert not notes


@for_each(("line", "reason"), cases(TAKEN))
def test_what_asks_for_nothing_new_is_taken_with_one_line(line: str, reason: str) -> None:
    config, notes = parse_command_line(shlex.split(line))
    assert config == RuntimeConfig()
    (note,) = notes
    assert note.startswith(line + ": nothing changes: ")
    assert reason in note


@for_each(("line", "reason"), cases(REFUSED))
def test_what_cannot_be_had_is_refused_with_what_to_do(line: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)):
        parse_args(shlex.split(line))


def test_every_row_does_as_it_says() -> None:
    for flag in PEER_FLAGS:
        check_row(flag)


def check_row(flag: PeerFlag) -> None:
    """Check each of its values, and one that nobody has thought of; a switch on and off."""
    name = flag.names[-1]
    for value, settings in flag.understood.items():
        assert parse_args([name, value]) == from_values(dict(settings))
    for value in flag.neutral:
        assert flag.meaning(name, value) == ({}, flag.taken)
    if not flag.has_value:
        off = Meaning({}, flag.taken or "off is what it is anyway")
        assert flag.meaning(name, "false") == off
    if flag.refused:
        with pytest.raises(ConfigError, match=f"^{name}(?: thing)?: {re.escape(flag.refused)}$"):
            parse_args([name, "thing"] if flag.has_value else [name])
    elif flag.taken:
        assert parse_command_line([name, "thing"] if flag.has_value else [name]).notes


def test_no_row_hides_behind_a_setting_of_ours() -> None:
    own = {"--" + name.replace("_", "-") for name in SETTINGS}.union(*map(flags_of, SETTINGS))
    names = [name for flag in PEER_FLAGS for name in flag.names]
    assert not own.intersection(names)
    assert all(peer_flag(name) for name in names)
    assert len(set(names)) == len(names)
    assert set(names) < set(option_names(make_parser()))


@for_each(
    ("words", "name", "value"),
    [
        (["--max_model_len=25.6k"], "context_length", 25_600),
        (["--max-model-len", "8K"], "context_length", 8192),
        (["--max-num-batched-tokens=4k"], "chunked_prefill_size", 4000),
        (["-tp=2"], "tp_size", 2),
        (["--api-key", "one", "two"], "api_key", "one,two"),
        (["--cuda-graph-bs", "1", "2", "4"], "cuda_graph_bs", "1,2,4"),
        (
            ["--allowed-origins", '["https://a.example", "https://b.example"]'],
            "cors_origins",
            "https://a.example,https://b.example",
        ),
        (["--runner", "pooling"], "task", "embed"),
        (["--model-impl", "vllm"], "model_impl", "native"),
        (["--enable-deterministic-inference"], "deterministic", True),
        (["--no-enable-deterministic-inference"], "deterministic", False),
        (["--preset", "trtllm", "--enable-prefix-caching"], "disable_radix_cache", False),
        (["--preset", "trtllm", "--no-disable-radix-cache"], "disable_radix_cache", False),
        (["--no-async-scheduling", "--async-scheduling"], "disable_overlap_schedule", False),
        (["--no-enable-chunked-prefill"], "disable_chunked_prefill", True),
        (["--no-enforce-eager"], "disable_cuda_graph", False),
    ],
)
def test_values_and_switches_read_as_the_peers_read_them(words: list[str], name: str, value: object) -> None:
    assert getattr(parse_args(words), name) == value


@for_each(
    ("words", "reason"),
    [
        (["--trust-remote-code", "maybe"], "--trust-remote-code: expected nothing, true or false"),
        (["--data-parallel-size", "2"], "--data-parallel-size 2: data parallelism is not built"),
        (["-dp", "2"], "-dp 2: data parallelism is not built"),
        (["--max-model-len", "auto"], "--max-model-len auto: leave it out"),
        (["--max-model-len", "1.5K"], "8k (8,000) or 8K (8,192), got '1.5K'"),
        (
            ["--max-model-len", "long"],
            "--max-model-len/--max-seq-len: expected a whole number",
        ),
        (["--gpu-memory-utilization", "most"], "expected a number, got 'most'"),
        (["--max-logprobs", "5"], "--max-logprobs 5: "),
        (["--load-format", "pt"], "--load-format pt: safetensors files are all that is ever read"),
        (["--seed"], "argument --seed/--random-seed: expected one argument"),
        (
            ["--seed", "1", "some/model"],
            "unexpected argument 'some/model' after --seed",
        ),
        (["--enable-lora-bias"], "--enable-lora-bias: adapters with biases are refused"),
    ],
)
def test_what_is_wrong_is_said_with_the_option_that_was_given(words: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)):
        parse_args(words)


@for_each(
    ("words", "meant"),
    [
        ("--max-model-length 1024", "--max-model-len"),
        ("--max-model-length=1024", "--max-model-len"),
        ("--tensor-paralel-size 2", "--tensor-parallel-size"),
        ("--gpu-mem-utilization 0.5", "--gpu-memory-utilization"),
        ("--max-run 4", ""),
        ("--prot 8000", "--port"),
        ("--served-model a", "--served-model-name"),
        ("--trust-remote-cod", "--trust-remote-code"),
        ("--no-such-flag", ""),
        ("--speculative-algoritm NGRAM", "--speculative-algorithm"),
        ("--lora-module a=b", "--lora-modules"),
        ("-x", ""),
    ],
)
def test_a_misspelt_option_gets_the_nearest_name(words: str, meant: str) -> None:
    """The beginning of a name is not the name: of another server it might be one of its own."""
    name = re.split("[ =]", words)[0]
    expected = f"did you mean {meant}?" if meant else "--help lists"
    with pytest.raises(ConfigError, match=rf"^unknown option {name}; {re.escape(expected)}"):
        parse_args(words.split())


@pytest.mark.parametrize("words", ["serve some/model", "some/model"])
def test_a_command_or_a_bare_model_is_refused_with_the_option(words: str) -> None:
    with pytest.raises(ConfigError, match=r"^unexpected argument .* named with --model"):
        parse_args(words.split())


def test_help_has_groups_and_an_example() -> None:
    text = make_parser("carousel").format_help()
    for title in ("model", "KV cache", "scheduler", "HTTP, client library, logs"):
        assert f"\n{title}:\n" in text
    for line in re.findall(r"^  carousel (.*)", text, re.MULTILINE):
        assert parse_args(shlex.split(line)).model
    assert "docs/migrating.md" in text
    assert "--trust-remote-code" not in text


def test_every_family_is_reached_by_each_of_its_names() -> None:
    """No setting and no row of ours has such a name, and no family before it."""
    for family in PEER_FAMILIES:
        options = [f"{name}of-no-known-kind" if name.endswith("-") else name for name in family.names]
        for option in options:
            assert peer_flag(option) is None, option
            assert family_reason(option) == family.refused, option
        with pytest.raises(ConfigError, match=f"^{re.escape(f'{options[0]}: {family.refused}')}$"):
            raise AssertionError(parse_args([options[0], "thing"]))


def test_a_keyword_of_a_family_is_refused_with_its_reason() -> None:
    with pytest.raises(ConfigError, match=r"^hicache_ratio: a KV cache is its server's alone; leave it out$"):
        flags_of_keywords({"hicache_ratio": 2})


def test_the_figures_of_the_table_are_the_products() -> None:
    assert SETTINGS["detokenizer_workers"][1].le == MAX_DETOKENIZERS
    assert peer_flag("--max-logprobs").neutral == (str(MAX_LOGPROBS),)  # type: ignore[union-attr]
    figure = f"NGRAM looks for the longest match of up to {MAX_NGRAM} tokens"
    assert peer_flag("--ngram-prompt-lookup-max").taken == figure  # type: ignore[union-attr]
    family = next(each for each in PEER_FAMILIES if "--speculative-ngram-" in each.names)
    assert family.refused.startswith(figure)


def test_the_page_shows_the_table() -> None:
    page = (ROOT / "docs" / "migrating.md").read_text()
    shown = re.findall(r"^\| `-.*$", page, re.MULTILINE)
    assert shown == rows(), "\n" + "\n".join(rows())


def rows() -> list[str]:
    """The table as docs/migrating.md has it."""
    found = []
    for name in SETTINGS:
        if spellings := flags_of(name):
            found.append((spellings, f"`{_flag(name)}`"))
        for value, own in VALUES.get(name, {}).items():
            found.append(((f"{_flag(name)} {value}",), f"`{_flag(name)} {own}`"))
        for value, (own, note) in NEUTRAL_VALUES.get(name, {}).items():
            found.append(((f"{_flag(name)} {value}",), f"`{_flag(name)} {own}`: {note}"))
        reasons = REFUSED_VALUES.get(name, {})
        for reason in dict.fromkeys(reasons.values()):
            refused = tuple(f"{_flag(name)} {value}" for value in reasons if reasons[value] == reason)
            found.append((refused, f"refused: {reason}"))
    found += [(flag.names, _fate(flag)) for flag in PEER_FLAGS]
    for family in PEER_FAMILIES:
        names = tuple(f"{name}*" if name.endswith("-") else name for name in family.names)
        found.append((names, f"refused: {family.refused}"))
    return [f"| {', '.join(f'`{name}`' for name in names)} | {fate} |" for names, fate in found]


def _fate(flag: PeerFlag) -> str:
    parts = []
    for value, settings in flag.understood.items():
        own = " ".join(
            _flag(name) if setting is True else f"{_flag(name)} {setting}"
            for name, setting in settings.items()
        )
        parts.append(f"`{value}`: `{own}`" if flag.has_value else f"`{own}`")
    if flag.taken:
        values = ", ".join(f"`{value}`" for value in flag.neutral)
        parts.append(f"{values}{': ' if values else ''}taken: {flag.taken}")
    if flag.refused:
        parts.append(f"{'else ' if parts else ''}refused: {flag.refused}")
    return ". ".join(parts)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
