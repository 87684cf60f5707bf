"""Digests of what requests ask for. They tell a suspect from another request that is sent under its name."""

from __future__ import annotations

import hashlib

import msgspec

from runtime.wire.format import CONTENT_BYTES
from runtime.wire.handle import NO_HANDLE, index_of
from runtime.wire.messages import GenerateRequest
from runtime.wire.sampling_params import SamplingParams

_encode = msgspec.msgpack.Encoder().encode


def content_of_request(request: GenerateRequest, secret: bytes) -> bytes:
    """Return a digest of CONTENT_BYTES, which all attempts and sequences of a request share. secret: key of
    the launch, without which nobody finds two requests with the same digest.
    """
    same = msgspec.structs.replace(
        request,
        handle=NO_HANDLE,
        sampling=request.sampling.of_all_sequences(index_of(request.handle)),
        time_limit_ms=0,
        resume=None,
        trace=None,
    )
    digest = hashlib.sha256(secret)
    digest.update(_encode(same))  # not joined to the key: a text may have 16 MiB
    return digest.digest()[:CONTENT_BYTES]


def content_of_sequence(content: bytes, sampling: SamplingParams) -> bytes:
    """Return the digest of one sequence, which all of its attempts share. content: digest of its request.
    sampling: its own parameters.
    """
    wants_context = sampling.return_context_logits or sampling.gather_context
    if sampling.prompt_logprobs is None and not wants_context:
        return content
    logprobs = (sampling.prompt_logprobs, sampling.prompt_logprobs_start)
    parts = (logprobs, sampling.return_context_logits, sampling.gather_context)
    return hashlib.sha256(content + _encode(parts)).digest()[:CONTENT_BYTES]
