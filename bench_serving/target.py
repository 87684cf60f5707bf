"""BenchTarget: a server that is ready, and the functions that write prompts for its model."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from bench_serving.arguments import BACKENDS, BenchConfig
from bench_serving.backends.base import Backend, BenchPrompt, ChatTurn, GenerationOptions
from bench_serving.backends.over_http import http_backend, served_model, tokenizer_path
from bench_serving.backends.sdk import SdkBackend
from bench_serving.datasets.base import PromptSource, TokenizerSource, WordSource
from bench_serving.load import Render, as_messages, as_text
from carousel.client.async_ import AsyncClient
from carousel.client.connection.target import find_run_dir
from carousel.http_client import HttpClient, RequestFailure
from runtime.base.errors import ConfigError, InvalidRequest, RingClosed
from runtime.ring.endpoints import Endpoints
from runtime.ring.process import LaunchFile
from runtime.settings.config import DEMO_MODEL
from runtime.text.tokenizer import Tokenizer
from runtime.text.tokenizer import load as load_tokenizer

DEMO_MODEL_NAME = "carousel-demo"
# A server may delay /metrics behind its requests; the measurement is kept all the same.
METRICS_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class BenchTarget:
    backend: Backend
    source: PromptSource
    render: Render
    tokenizer: Tokenizer | None
    metrics_http: HttpClient | None
    """Client for the server's /metrics; None without HTTP."""
    description: str
    """Description for the user: address, model and tokenizer."""


async def open_target(config: BenchConfig) -> BenchTarget:
    """Find the server, its model and the model's tokenizer.

    Raises: RequestFailure if the server does not answer, RingClosed if there is no runtime, ModelError for a
    tokenizer that cannot be read, ConfigError for flags that this server or tokenizer cannot serve.
    """
    options = GenerationOptions(
        stream=not config.disable_stream,
        ignore_eos=not config.disable_ignore_eos,
        add_special_tokens=not config.apply_chat_template,
        extra=config.extra,
        counts_tokens=BACKENDS[config.backend].counts_tokens,
        num_logprobs=config.num_logprobs,
        context_logits=config.return_context_logits,
        generation_logits=config.return_generation_logits,
    )
    backend: Backend
    metrics_http: HttpClient | None = None
    if config.speaks == "sdk":
        run_dir = find_run_dir(config.run_dir or None)
        where = str(run_dir)
        launch = _launch_file(run_dir).config
        model, tokenizer_dir = launch.model_names[0], config.tokenizer or launch.tokenizer
        client = AsyncClient(run_dir)
        backend = SdkBackend(client, options, timeout_s=config.request_timeout, clock=time.perf_counter)
        await client.connect()
    else:
        where = config.server_url
        http = HttpClient(where, config.headers, timeout_s=config.request_timeout, clock=time.perf_counter)
        metrics_http = HttpClient(where, config.headers, timeout_s=METRICS_TIMEOUT_S, clock=time.perf_counter)
        model = config.model or await served_model(http)
        tokenizer_dir = config.tokenizer or _tokenizer_of(model) or await _tokenizer_of_server(metrics_http)
        backend = http_backend(config.speaks, http, model, options, time.perf_counter)
    tokenizer = _load(tokenizer_dir) if tokenizer_dir else None
    return BenchTarget(
        backend,
        TokenizerSource(tokenizer) if tokenizer is not None else WordSource(),
        _render(config, tokenizer),
        tokenizer,
        metrics_http,
        f"{config.backend} at {where}, model {model}, "
        + (f"tokenizer {tokenizer_dir}" if tokenizer_dir else "no tokenizer: a word is taken for a token"),
    )


def _launch_file(run_dir: Path) -> LaunchFile:
    try:
        return LaunchFile.read(Endpoints(run_dir).config_file)
    except FileNotFoundError:
        raise RingClosed(f"no runtime has its files in {run_dir}") from None


def _tokenizer_of(model: str) -> str:
    """Return the directory of a model's tokenizer; empty if it is not on this machine. Models are
    often named by their directory, and the demo model's is known.
    """
    if model == DEMO_MODEL_NAME:
        return str(DEMO_MODEL)
    return model if (Path(model) / "tokenizer.json").is_file() else ""


async def _tokenizer_of_server(http: HttpClient) -> str:
    """Return the directory that the server says its tokenizer is in; empty if it does not say, or if it is on
    another machine.
    """
    directory = await tokenizer_path(http)
    return directory if directory and (Path(directory) / "tokenizer.json").is_file() else ""


def _load(directory: str) -> Tokenizer:
    """Load the tokenizer. Rendered conversations are sent as text, in which special tokens are recognised."""
    return load_tokenizer(Path(directory), allow_special_tokens=True)


def _render(config: BenchConfig, tokenizer: Tokenizer | None) -> Render:
    if config.speaks == "chat":
        return as_messages
    if not config.apply_chat_template:
        return as_text
    if tokenizer is None or not tokenizer.has_chat_template:
        raise ConfigError("--apply-chat-template: no tokenizer with a chat template; name one by --tokenizer")
    renderer = tokenizer

    def render(messages: list[ChatTurn]) -> BenchPrompt:
        try:
            text = renderer.apply_chat_template(messages)
        except InvalidRequest as error:
            raise RequestFailure(error.message) from None
        # /generate puts special tokens in front of every text.
        if config.speaks == "generate":
            return [int(token) for token in renderer.encode_batch([text], add_special_tokens=False)[0]]
        return text

    return render
