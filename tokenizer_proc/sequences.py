"""Sequences: makes the sequences of a request, which share its prompt and nothing else. Knows no socket."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from runtime.ring.suspects.content import content_of_sequence
from runtime.ring.suspects.roster import content_in, suspect_of
from runtime.text.codec import PROMPT_TAIL_TOKENS, PromptEncoder
from runtime.wire.format import TENANT_BYTES, TOKEN_BYTES, IntArray, pack_ids
from runtime.wire.handle import MAX_INDEX, NO_HANDLE, sibling, split_handle
from runtime.wire.messages import GenerateRequest, StreamOpen, TokenizedRequest
from runtime.wire.perf_metrics import Stamp, TraceStamps
from runtime.wire.plan import AdapterRef
from runtime.wire.sampling_params import SamplingParams
from tokenizer_proc.adapters import AdapterTable
from tokenizer_proc.bad_words import with_bad_words_as_ids
from tokenizer_proc.receipt import Receipt

NO_BOUND = 1 << 31
NAMESPACE_BYTES = 16


@dataclass(slots=True, eq=False)
class Job:
    """An admitted request, with everything that is known about it so far."""

    request: GenerateRequest
    handles: tuple[bytes, ...]
    """Handles of the request's sequences."""
    sampling: SamplingParams
    """Sampling parameters of the request, in the end with bad words converted to ids."""
    arrived_s: float
    deadline_s: float
    received_s: float
    """Time at which the tokenizer read the request."""
    is_again: bool
    """True if the request is submitted again after a restart."""
    suspect: bytes = suspect_of(NO_HANDLE)
    """Its name in hand, with the digest of what it asks for."""
    prediction_ids: bytes = b""
    """Token ids of the request's prediction, packed."""
    adapter: AdapterRef | None = None
    """Adapter of the request with its version, or None."""
    prompt_table: AdapterRef | None = None
    """Prompt table of the request with its version, or None."""

    @property
    def num_in_front(self) -> int:
        """Return how many virtual tokens are put before the prompt."""
        table, asked = self.prompt_table, self.request.prompt_table
        return table.num_virtual if table is not None and asked is not None and asked.name else 0

    @property
    def num_addressed(self) -> int:
        """Return how many ids from the vocabulary's size on the prompt may contain."""
        return 0 if self.prompt_table is None or self.num_in_front else self.prompt_table.num_virtual

    def trace_at(self, now_s: float) -> TraceStamps | None:
        """Return the request's trace, if it is sampled, with the time in the tokenizer added."""
        trace = self.request.trace
        if trace is None:
            return None
        return trace.add(Stamp("tokenizer_in", self.received_s), Stamp("tokenizer_out", now_s))


class JobMaker:
    """Makes jobs of admitted requests: converts relative times to absolute ones and, as a second step, words
    to ids.
    """

    def __init__(self, tokenizer: PromptEncoder, vocab_size: int, adapters: AdapterTable) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._adapters = adapters

    def make(
        self,
        request: GenerateRequest,
        receipt: Receipt,
        *,
        is_again: bool,
        suspect: bytes = suspect_of(NO_HANDLE),
    ) -> Job:
        """Return the job of a request that arrived at `receipt`, to be completed. suspect: as in Job. Raises
        InvalidRequest.
        """
        return Job(
            request,
            sequence_handles(request),
            request.sampling,
            receipt.arrived_s(request.arrival_time),
            receipt.deadline_s(request.time_limit_ms),
            received_s=receipt.monotonic_s,
            is_again=is_again,
            suspect=suspect,
            adapter=self._adapters.resolved(request.adapter, request.tenant),
            prompt_table=self._adapters.resolved_table(request.prompt_table, request.tenant),
        )

    def complete(self, job: Job) -> None:
        """Convert bad words and the prediction to ids. Any thread may call this. Raises InvalidRequest."""
        job.sampling = with_bad_words_as_ids(job.sampling, self._tokenizer, self._vocab_size)
        if text := job.request.prediction:
            ids = self._tokenizer.encode_batch([text], add_special_tokens=False)[0]
            job.prediction_ids = pack_ids(ids)


def sequence_handles(request: GenerateRequest) -> tuple[bytes, ...]:
    """Return the handles of a request's sequences: its own and those with the next indexes."""
    handle, count = request.handle, request.sampling.n
    if count == 1:
        return (handle,)
    _, _, first, _ = split_handle(handle)
    return tuple(sibling(handle, index) for index in range(first, min(first + count, MAX_INDEX + 1)))


class SequenceMaker:
    def __init__(self, secret: bytes, *, shares_prefixes: bool = False) -> None:
        """secret: key of the digests that separate the caches of tenants and salts. shares_prefixes: True if
        tenants are not separated.
        """
        self._secret = secret
        self._shares_prefixes = shares_prefixes
        self._encode_open = msgspec.msgpack.Encoder().encode

    def make(
        self, job: Job, ids: IntArray, trace: TraceStamps | None = None, vocab_size: int = NO_BOUND
    ) -> list[TokenizedRequest]:
        """Return the sequences of a request with the prompt `ids`; those of a beam search are a single one.
        trace: of the request so far. Ids from vocab_size on are virtual tokens.
        """
        request, resume = job.request, job.request.resume
        input_ids = pack_ids(ids)
        tenant = "" if self._shares_prefixes else request.tenant
        contents = (job.adapter, job.prompt_table)
        space = namespace(tenant, request.cache_salt, self._secret, *contents, extra_ids=request.extra_ids)
        words = input_ids if job.prompt_table is None else pack_ids(ids[ids < vocab_size])
        sequences: list[TokenizedRequest] = []
        for number, handle in enumerate(job.handles):
            sampling = job.sampling.of_sequence(number)
            content = content_of_sequence(content_in(job.suspect), sampling)
            sequence = TokenizedRequest(
                handle=handle,
                input_ids=input_ids,
                sampling=sampling,
                stream_open=msgspec.Raw(self._encode_open(_stream_open(job, handle, words, content))),
                priority=request.priority,
                namespace=space,
                output_ids=b"" if resume is None else resume.output_ids,
                num_prompt_logprobs=0 if resume is None else resume.num_prompt_logprobs,
                arrived_s=job.arrived_s,
                deadline_s=job.deadline_s,
                retention=request.retention,
                guide=request.guide,
                tenant=request.tenant,
                is_again=job.is_again,
                draft_ids=request.draft_ids,
                prediction_ids=job.prediction_ids,
                adapter=job.adapter,
                trace=trace,
                processors=request.processors,
                label=request.label if request.processors else "",
                prompt_table=job.prompt_table,
                content=content,
            )
            sequences.append(sequence)
        return sequences if job.sampling.num_beams == 1 else [_search_of(job, sequences)]


def _search_of(job: Job, sequences: Sequence[TokenizedRequest]) -> TokenizedRequest:
    """Return the one sequence that stands for all of a beam search."""
    first, *others = sequences
    return msgspec.structs.replace(
        first,
        sampling=job.sampling,
        more_opens=tuple(other.stream_open for other in others),
        shows_hypotheses=job.request.stream,
    )


def _stream_open(job: Job, handle: bytes, prompt: bytes, content: bytes) -> StreamOpen:
    """Return how a sequence's stream begins. prompt: its packed ids, without virtual tokens."""
    request, sampling = job.request, job.sampling
    return StreamOpen(
        handle=handle,
        num_prompt_tokens=len(prompt) // TOKEN_BYTES,
        prompt_tail=prompt[-PROMPT_TAIL_TOKENS * TOKEN_BYTES :],
        label=request.label,
        stream=request.stream,
        stop=sampling.stop,
        stop_words=tuple(pack_ids(word) for word in sampling.stop_words_ids),
        include_stop_str_in_output=sampling.include_stop_str_in_output,
        skip_special_tokens=sampling.skip_special_tokens,
        min_tokens=sampling.min_tokens,
        resume=request.resume,
        content=content,
    )


def namespace(
    tenant: str, cache_salt: str, secret: bytes, *contents: AdapterRef | None, extra_ids: bytes = b""
) -> bytes:
    """Return the namespace in which a request's KV cache may be shared: empty for the owner without salt and
    contents. Otherwise TENANT_BYTES for the tenant (zeros for the owner), and NAMESPACE_BYTES each for the
    salt, and for the versions of adapter and prompt table with the extra ids, if there are any. All are keyed
    digests, so that nobody can construct a salt with the same namespace.
    """
    refs = [each for each in contents if each is not None]
    if not tenant and not cache_salt and not refs:
        return b""
    space = bytes(TENANT_BYTES)
    if tenant:
        space = hashlib.blake2b(tenant.encode(), digest_size=TENANT_BYTES, key=secret).digest()
    if cache_salt:
        space += hashlib.blake2b(cache_salt.encode(), digest_size=NAMESPACE_BYTES, key=secret).digest()
    if refs:
        identity = "\0".join(text for each in refs for text in (each.name, each.version, each.path)).encode()
        if extra_ids:
            identity += b"\0\0" + extra_ids
        space += hashlib.blake2b(
            identity, digest_size=NAMESPACE_BYTES, key=secret, person=b"adapter"
        ).digest()
    return space
