"""Several outputs of a sequence as one, and their token ids as ints."""

from __future__ import annotations

from runtime.wire.format import TOKEN_BYTES
from runtime.wire.messages import SequenceOutput


def joined(outputs: list[SequenceOutput]) -> SequenceOutput:
    """Return several outputs as one, with packed arrays concatenated."""
    if len(outputs) == 1:
        return outputs[0]
    return SequenceOutput(
        outputs[0].handle,
        "".join([output.text for output in outputs]),
        b"".join([output.token_ids for output in outputs]),
        b"".join([output.logprobs for output in outputs]),
        b"".join([output.top_ids for output in outputs]),
        b"".join([output.top_logprobs for output in outputs]),
        outputs[-1].finish,
        b"".join([output.prompt_logprobs for output in outputs]),
        b"".join([output.prompt_top_ids for output in outputs]),
        b"".join([output.prompt_top_logprobs for output in outputs]),
        max(output.num_prompt_tokens for output in outputs),
        next((output.hypothesis for output in reversed(outputs) if output.hypothesis), b""),
        b"".join([output.prompt_ranks for output in outputs]),
    )


def unpack_ids(data: bytes) -> list[int]:
    """Unpack ids as runtime.wire.format does, directly to ints."""
    if len(data) == TOKEN_BYTES:  # the most frequent case by far
        return [int.from_bytes(data, "little")]
    ids: list[int] = memoryview(data).cast("i").tolist()
    return ids
