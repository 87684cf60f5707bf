"""cut_prompts: encodes long prompts that are to be truncated, so that only their last ids are kept."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from carousel.client.core.request.submission import RequestOptions, Submission
from carousel.server.request.prompts import with_ids
from carousel.server.request.tokenizer import num_chars
from carousel.server.server_state import ServerState
from runtime.base.errors import InvalidRequest
from runtime.wire.format import MAX_PROMPT_TOKENS, TOKEN_BYTES

LEAST_TIME_S = 0.001


async def cut_prompts(
    server: ServerState, submissions: Sequence[Submission], tenant: str, asked_s: float
) -> tuple[list[Submission], int]:
    """Return a tenant's requests with ids instead of those prompts that take less room as ids, and the most
    bytes that are then kept of all prompts. The time since `asked_s`, by time.perf_counter(), is taken from
    their time limits.

    A prompt that cannot be encoded stays as it is, so that the ring refuses it as it refuses a short one. So
    does every text whose tokenizer does not encode in parts, because that takes far more room for a moment.
    """
    num_last = _num_last(server, submissions[0])
    cut = list(submissions)
    if num_last is not None:
        long = [at for at, each in enumerate(cut) if num_chars(each.prompt) > TOKEN_BYTES * num_last]
        prompts = [(cut[at].prompt, cut[at].options) for at in long]
        found = await server.tokenizer.last_ids(prompts, num_last, server.vocab_size, tenant)
        for at, ids in zip(long, found, strict=True):
            if ids is not None:
                (cut[at],) = with_ids([cut[at]], [ids])
    num_kept = sum(_num_bytes(each) for each in cut)
    return [_with_less_time(each, time.perf_counter() - asked_s) for each in cut], num_kept


def _num_last(server: ServerState, submission: Submission) -> int | None:
    """Return the maximum number of tokens that are kept of each prompt; None if none is to be cut here."""
    sampling = submission.sampling
    if sampling.truncate_prompt_tokens is None or not server.tokenizer.is_there:
        return None
    try:
        sampling.check_truncation(server.config.context_length)
    except InvalidRequest:
        return None
    return sampling.num_kept(MAX_PROMPT_TOKENS, server.longest_sequence, server.config.max_prompt_len)


def _num_bytes(submission: Submission) -> int:
    """Return the most bytes that are kept of a request's prompt and tools. A character has up to four, like
    an id.
    """
    return TOKEN_BYTES * num_chars(submission.prompt) + len(submission.options.get("tools") or b"")


def _with_less_time(submission: Submission, passed_s: float) -> Submission:
    limit_s = submission.options.get("time_limit")
    if limit_s is None:
        return submission
    options = RequestOptions({**submission.options, "time_limit": max(LEAST_TIME_S, limit_s - passed_s)})
    return msgspec.structs.replace(submission, options=options)
