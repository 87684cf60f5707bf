"""BenchConfig: the command line of python -m bench_serving, generated from one struct and checked as a whole.

Names are SGLang's. A flag that the chosen backend or dataset would not use is refused, never ignored.
"""

from __future__ import annotations

import argparse
import difflib
import math
import typing
from collections.abc import Sequence
from os.path import expanduser
from typing import Annotated, Any, NamedTuple, get_args, get_origin

import msgspec
from msgspec import Meta

from runtime.base.errors import ConfigError


class BackendKind(NamedTuple):
    speaks: str
    """API that the server is asked with: completions, chat, generate or sdk."""
    usual_port: int
    counts_tokens: bool
    """True if the server knows stream_options.continuous_usage_stats, which is not OpenAI's and which others
    may refuse.
    """


BACKENDS = {
    "carousel": BackendKind("completions", 30000, True),
    "carousel-chat": BackendKind("chat", 30000, True),
    "openai": BackendKind("completions", 8000, False),
    "openai-chat": BackendKind("chat", 8000, False),
    "vllm": BackendKind("completions", 8000, True),
    "vllm-chat": BackendKind("chat", 8000, True),
    "sglang": BackendKind("generate", 30000, True),
    "sglang-oai": BackendKind("completions", 30000, True),
    "sglang-oai-chat": BackendKind("chat", 30000, True),
    "sdk": BackendKind("sdk", 0, True),
}

DATASETS = ("random", "random-ids", "generated-shared-prefix", "multi-turn", "sharegpt", "custom")
FILE_DATASETS = ("sharegpt", "custom")
RANDOM_DATASETS = ("random", "random-ids", "multi-turn")
DEFAULT_NUM_PROMPTS = 1000
SLO_NAMES = ("ttft", "tpot", "e2el")

FLAG_DATASETS: dict[str, tuple[str, ...]] = {
    "random_": RANDOM_DATASETS,
    "gsp_": ("generated-shared-prefix",),
    "sharegpt_": FILE_DATASETS,
    "dataset_path": FILE_DATASETS,
    "num_turns": ("multi-turn",),
}
"""Prefixes of field names -> the datasets that use these fields."""
HTTP_FIELDS = ("base_url", "host", "port", "model", "header", "check_metrics")
SDK_FIELDS = ("run_dir", "return_context_logits", "return_generation_logits")


PATH_FIELDS = ("run_dir", "tokenizer", "dataset_path", "output_file", "plot")


def _flag(description: str, **bounds: Any) -> Meta:
    return Meta(description=description, **bounds)


class BenchConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    backend: Annotated[str, _flag(f"what to talk to: {', '.join(BACKENDS)}")] = "carousel"
    base_url: Annotated[str, _flag("address of the server, instead of host and port")] = ""
    host: Annotated[str, _flag("host of the server")] = "127.0.0.1"
    port: Annotated[int, _flag("port of the server; 0: the backend's usual one", ge=0, le=65535)] = 0
    run_dir: Annotated[str, _flag("sdk: the run directory of the launch; default: the only one alive")] = ""
    model: Annotated[str, _flag("model to ask for; default: the first of /v1/models")] = ""
    tokenizer: Annotated[str, _flag("directory of the model's tokenizer; default: where the model is")] = ""
    header: Annotated[tuple[str, ...], _flag("HTTP headers, each as Name=Value")] = ()
    request_timeout: Annotated[float, _flag("seconds until a request is given up", gt=0.0)] = 21600.0

    dataset_name: Annotated[str, _flag(f"where prompts come from: {', '.join(DATASETS)}")] = "random"
    dataset_path: Annotated[str, _flag("sharegpt, custom: the file, JSON or JSONL")] = ""
    num_prompts: Annotated[int, _flag(f"conversations to send; 0: {DEFAULT_NUM_PROMPTS}, or all", ge=0)] = 0
    random_input_len: Annotated[int, _flag("longest prompt", ge=1)] = 1024
    random_output_len: Annotated[int, _flag("longest output", ge=1)] = 1024
    random_range_ratio: Annotated[float, _flag("shortest length over longest", ge=0.0, le=1.0)] = 0.0
    num_turns: Annotated[int, _flag("multi-turn: turns of each conversation", ge=1)] = 3
    sharegpt_output_len: Annotated[int, _flag("output length; 0: as long as the file's answer", ge=0)] = 0
    sharegpt_context_len: Annotated[int, _flag("leave out what is longer; 0: nothing", ge=0)] = 0
    gsp_num_groups: Annotated[int, _flag("system prompts", ge=1)] = 64
    gsp_prompts_per_group: Annotated[int, _flag("prompts with the same system prompt", ge=1)] = 16
    gsp_system_prompt_len: Annotated[int, _flag("tokens of a system prompt", ge=1)] = 2048
    gsp_question_len: Annotated[int, _flag("longest question", ge=1)] = 128
    gsp_output_len: Annotated[int, _flag("longest output", ge=1)] = 256
    gsp_range_ratio: Annotated[float, _flag("shortest length over longest", ge=0.0, le=1.0)] = 1.0
    gsp_num_turns: Annotated[int, _flag("turns of each conversation", ge=1)] = 1
    gsp_ordered: Annotated[bool, _flag("send group after group instead of mixed")] = False
    apply_chat_template: Annotated[bool, _flag("render prompts with the tokenizer's chat template")] = False

    request_rate: Annotated[
        float, _flag("conversations begun per second (Poisson); inf: all at once", gt=0.0)
    ] = math.inf
    burstiness: Annotated[
        float, _flag("1: Poisson arrivals; less: in bursts; more: evenly (shape of the gamma gaps)", gt=0.0)
    ] = 1.0
    max_concurrency: Annotated[int, _flag("conversations in flight, at most; 0: no limit", ge=0)] = 0
    warmup_requests: Annotated[int, _flag("requests before the measurement", ge=0)] = 1
    seed: Annotated[int, _flag("of lengths, prompts and arrivals", ge=0)] = 1
    disable_stream: Annotated[bool, _flag("ask for whole answers; TTFT, TPOT and ITL are then unknown")] = (
        False
    )
    disable_ignore_eos: Annotated[bool, _flag("let the model end early; lengths become upper bounds")] = False
    return_logprob: Annotated[bool, _flag("ask for logprobs of the output and show their bytes")] = False
    top_logprobs_num: Annotated[int, _flag("likeliest tokens with their logprobs, at each", ge=0, le=20)] = 0
    return_context_logits: Annotated[bool, _flag("sdk: ask for raw logits of the prompt")] = False
    return_generation_logits: Annotated[bool, _flag("sdk: ask for raw logits of the output")] = False
    extra_request_body: Annotated[str, _flag("JSON object merged into each request")] = ""
    sweep: Annotated[str, _flag("rates to measure one after the other, such as 1,2,4,inf")] = ""
    flush_cache: Annotated[bool, _flag("empty the server's prefix cache before each measurement")] = False
    check_metrics: Annotated[
        bool, _flag("fail when the server has no /metrics, or they differ from the client's figures")
    ] = False
    goodput: Annotated[tuple[str, ...], _flag("bounds in ms, any of ttft:MS tpot:MS e2el:MS")] = ()

    output_file: Annotated[str, _flag("append one line of JSON per run to this file")] = ""
    output_details: Annotated[bool, _flag("with lengths, times, texts and errors of each request")] = False
    plot: Annotated[str, _flag("write latencies and throughput as a PNG to this file")] = ""
    disable_tqdm: Annotated[bool, _flag("no progress bar")] = False

    @property
    def speaks(self) -> str:
        """Return the API: completions, chat, generate or sdk."""
        return BACKENDS[self.backend].speaks

    @property
    def server_url(self) -> str:
        return self.base_url or f"http://{self.host}:{self.port or BACKENDS[self.backend].usual_port}"

    @property
    def headers(self) -> dict[str, str]:
        return {name: value for name, _, value in (each.partition("=") for each in self.header)}

    @property
    def extra(self) -> dict[str, object]:
        return _extra_fields(self.extra_request_body)

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs_num if self.return_logprob else None

    @property
    def asks_for_extra(self) -> bool:
        return self.return_logprob or self.return_context_logits or self.return_generation_logits

    @property
    def rates(self) -> list[float]:
        """Return the requests per second of each run: one, unless --sweep lists several."""
        return _rates(self.sweep) if self.sweep else [self.request_rate]

    @property
    def slo_ms(self) -> dict[str, float]:
        return dict(_slo(each) for each in self.goodput)


def parse_args(argv: Sequence[str] | None = None) -> BenchConfig:
    """Parse a command line. Raises ConfigError that names the flag; exits for --help."""
    given = vars(_make_parser().parse_args(argv))
    # A shell leaves a ~ behind an equals sign as it is.
    given |= {name: expanduser(given[name]) for name in PATH_FIELDS if name in given}
    try:
        config = msgspec.convert(given, BenchConfig, strict=False)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `$.")
        raise ConfigError(f"{_spell(path.rstrip('`').partition('[')[0])}: {problem}") from None
    _check(config, set(given))
    return config


def _check(config: BenchConfig, given: set[str]) -> None:
    if config.backend not in BACKENDS:
        raise ConfigError(f"--backend: {config.backend!r} is none of {', '.join(BACKENDS)}")
    if config.dataset_name not in DATASETS:
        raise ConfigError(f"--dataset-name: {config.dataset_name!r} is none of {', '.join(DATASETS)}")
    _check_backend_flags(config, given)
    _check_dataset_flags(config, given)
    for header in config.header:
        if not header.partition("=")[1] or {"\r", "\n"} & set(header):
            raise ConfigError("--header: each must be Name=Value")
    # Each raises its own error.
    _ = config.extra, config.rates, config.slo_ms
    for one, other in (("base_url", "host"), ("base_url", "port"), ("sweep", "request_rate")):
        if {one, other} <= given:
            raise ConfigError(f"{_spell(other)}: {_spell(one)} is given already")
    if "top_logprobs_num" in given and not config.return_logprob:
        raise ConfigError("--top-logprobs-num: only with --return-logprob")
    if "burstiness" in given and all(map(math.isinf, config.rates)):
        raise ConfigError("--burstiness: needs a finite --request-rate or --sweep")
    if config.output_details and not config.output_file:
        raise ConfigError("--output-details: name the file with --output-file")
    if config.disable_stream and {"ttft", "tpot"} & set(config.slo_ms):
        raise ConfigError("--goodput: ttft and tpot are unknown with --disable-stream")


def _check_backend_flags(config: BenchConfig, given: set[str]) -> None:
    if config.speaks == "sdk":
        for name in HTTP_FIELDS:
            if name in given:
                raise ConfigError(f"{_spell(name)}: the sdk backend has no HTTP; it takes --run-dir")
    for name in SDK_FIELDS:
        if name in given and config.speaks != "sdk":
            raise ConfigError(f"{_spell(name)}: only the sdk backend uses it")
    if config.speaks == "chat":
        if config.apply_chat_template:
            raise ConfigError(f"--apply-chat-template: the server does it for {config.backend}")
        if config.dataset_name == "random-ids":
            raise ConfigError(f"--dataset-name: {config.backend} takes no token ids; use random")


def _check_dataset_flags(config: BenchConfig, given: set[str]) -> None:
    for name in sorted(given):
        for beginning, datasets in FLAG_DATASETS.items():
            if name.startswith(beginning) and config.dataset_name not in datasets:
                raise ConfigError(f"{_spell(name)}: only for --dataset-name {' or '.join(datasets)}")
    if config.dataset_name in FILE_DATASETS and not config.dataset_path:
        raise ConfigError(f"--dataset-path: {config.dataset_name} reads a local file; name it")
    if config.apply_chat_template and config.dataset_name == "random-ids":
        raise ConfigError("--apply-chat-template: random-ids has no text")


def _extra_fields(text: str) -> dict[str, object]:
    if not text:
        return {}
    try:
        extra = msgspec.json.decode(text, type=dict[str, object])
    except msgspec.DecodeError as error:
        raise ConfigError(f"--extra-request-body: {error}") from None
    if "stream" in extra:
        raise ConfigError("--extra-request-body: stream is --disable-stream's to say")
    inner = extra.get("sampling_params")
    fields = extra | (inner if isinstance(inner, dict) else {})
    if any(fields.get(name) not in (None, 1) for name in ("n", "best_of")):
        raise ConfigError(
            "--extra-request-body: one sequence per request is measured; n and best_of must be 1"
        )
    return extra


def _rates(text: str) -> list[float]:
    try:
        rates = [float(each) for each in text.split(",")]
    except ValueError:
        raise ConfigError(f"--sweep: {text!r} is not a list of numbers such as 1,2,4,inf") from None
    if not all(rate > 0 for rate in rates):
        raise ConfigError("--sweep: rates must be above 0")
    return rates


def _slo(text: str) -> tuple[str, float]:
    name, _, bound = text.partition(":")
    try:
        bound_ms = float(bound)
    except ValueError:
        bound_ms = math.nan
    if name not in SLO_NAMES or not bound_ms > 0:
        raise ConfigError(f"--goodput: {text!r} is not one of ttft:MS, tpot:MS, e2el:MS")
    return name, bound_ms


def _spell(name: str) -> str:
    return "--" + name.replace("_", "-")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ").split()[0]
        if message.startswith("unrecognized") and unknown.startswith("-"):
            name = unknown.partition("=")[0]
            near = difflib.get_close_matches(name, self._option_string_actions, 1, 0.7)
            known = f"did you mean {near[0]}?" if near else "--help lists those there are"
            raise ConfigError(f"unknown option {name}; {known}")
        raise ConfigError(message)


def _make_parser() -> argparse.ArgumentParser:
    """Return a parser whose result has only the flags that were given, as text; msgspec converts and checks
    it.
    """
    parser = _Parser(
        prog="python -m bench_serving",
        description="Send a load to a server and measure its latencies and throughput.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    hints = typing.get_type_hints(BenchConfig, include_extras=True)
    for field in msgspec.structs.fields(BenchConfig):
        kind, meta = get_args(hints[field.name])
        assert isinstance(meta, Meta)
        assert meta.description is not None
        is_bare = field.default is False or field.default in ("", ())
        shown = "" if is_bare else f" (default: {field.default})"
        options: dict[str, Any] = {"dest": field.name, "help": (meta.description + shown).replace("%", "%%")}
        if kind is bool:
            options["action"] = "store_true"
        elif get_origin(kind) is tuple:
            options |= {"nargs": "+", "metavar": "TEXT"}
        else:
            options["metavar"] = kind.__name__.upper()
        parser.add_argument(_spell(field.name), **options)
    return parser
