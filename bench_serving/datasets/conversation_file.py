"""Prompts from a local file: ShareGPT's JSON array, or JSONL with one record to a line.

A record is {"conversations": [{"from" or "role", "value" or "content"}, ...]} or {"messages": [...]}, of
which the first turn is the prompt and the second the answer whose length is asked for; or {"prompt": text}
with an optional "output_len".
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from bench_serving.arguments import DEFAULT_NUM_PROMPTS
from bench_serving.datasets.base import Generator, LoadConversation, PromptSource, Turn
from runtime.base.errors import ConfigError

MIN_TOKENS = 2


def conversation_file(
    source: PromptSource,
    rng: Generator,
    num: int | None,
    *,
    path: Path,
    output_len: int | None,
    context_len: int | None,
) -> list[LoadConversation]:
    """`num` records of the file in random order, each with its first turn; None: all, and DEFAULT_NUM_PROMPTS
    at most.

    output_len replaces the lengths of the file's own answers. Left out are records with fewer than 2 tokens
    on either side (also those without an answer), and those longer than context_len, both sides together.
    Raises: ConfigError when the file cannot be read, or has fewer than `num` usable records, or none.
    """
    records = _read(path)
    most = DEFAULT_NUM_PROMPTS if num is None else num
    chosen: list[LoadConversation] = []
    for index in rng.permutation(len(records)):
        if len(chosen) == most:
            break
        turn = _first_turn(records[index], source, output_len, f"{path}: record {index + 1}")
        fits = context_len is None or turn.input_len + turn.output_len <= context_len
        if min(turn.input_len, turn.output_len) >= MIN_TOKENS and fits:
            chosen.append(LoadConversation((turn,)))
    if len(chosen) < (num or 1):
        asked = "" if num is None else f", {num} were asked for"
        raise ConfigError(
            f"--dataset-path: {path} has {len(chosen)} usable records of {len(records)}{asked}; one has at "
            f"least {MIN_TOKENS} tokens of prompt and an answer or output_len, unless --sharegpt-output-len "
            "says how long answers are"
        )
    return chosen


def _read(path: Path) -> list[Any]:
    try:
        data = path.read_bytes()
        if data.lstrip()[:1] == b"[":
            records: list[Any] = msgspec.json.decode(data)
            return records
        return [msgspec.json.decode(line) for line in data.splitlines() if line.strip()]
    except OSError as error:
        raise ConfigError(f"--dataset-path: {path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"--dataset-path: {path} is neither JSON nor JSONL: {error}") from None


def _first_turn(record: Any, source: PromptSource, output_len: int | None, where: str) -> Turn:
    prompt, answer_len = _prompt_and_answer_len(record, source, where)
    wanted = answer_len if output_len is None else output_len
    return Turn(prompt, source.count(prompt), wanted or 0)


def _prompt_and_answer_len(record: Any, source: PromptSource, where: str) -> tuple[str, int | None]:
    if isinstance(record, dict):
        prompt = record.get("prompt")
        if isinstance(prompt, str):
            output_len = record.get("output_len")
            return prompt, output_len if isinstance(output_len, int) else None
        turns = record.get("conversations", record.get("messages"))
        if isinstance(turns, list):
            texts = [_text_of(turn, where) for turn in turns[:2]]
            if texts:
                return texts[0], source.count(texts[1]) if len(texts) > 1 else None
            return "", None
    raise ConfigError(f"--dataset-path: {where} has no conversations, messages or prompt")


def _text_of(turn: Any, where: str) -> str:
    if isinstance(turn, dict):
        for key in ("value", "content"):
            if isinstance(turn.get(key), str):
                text: str = turn[key]
                return text
    raise ConfigError(f"--dataset-path: {where} has a turn without a text as value or content")
