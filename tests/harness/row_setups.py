"""Rows in the words of tests, number by number, and the numbers of their RowSetup."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import numpy as np

from runtime.sampling.columns import FLOATS, INTEGERS, ROW_DTYPE
from runtime.wire.format import pack_ids, unpack_floats, unpack_ids
from runtime.wire.plan import NO_ADAPTER, RowSetup
from runtime.wire.sampling_params import SamplingParams

NO_RESET = -7
"""An id that resets no top_p."""


class Row(msgspec.Struct, frozen=True):
    """A row whose history, age and minimum length a test chooses."""

    row: int
    num_prompt: int
    seed: int = 0
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    top_n_sigma: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_len: int = 0
    stop_ids: bytes = b""
    bias_ids: bytes = b""
    bias_values: bytes = b""
    num_logprobs: int = -1
    history_ids: bytes = b""
    allowed_ids: bytes = b""
    bad_words: tuple[bytes, ...] = ()
    no_repeat_ngram: int = 0
    top_p_decay: float = 1.0
    top_p_min: float = 0.0
    top_p_age: int = 0
    top_p_reset_ids: bytes = b""
    returns_logits: bool = False
    adapter_slot: int = NO_ADAPTER

    def setup(self) -> RowSetup:
        bias = zip(unpack_ids(self.bias_ids).tolist(), unpack_floats(self.bias_values).tolist(), strict=True)
        sampling = SamplingParams(
            seed=self.seed,
            min_tokens=int(self.min_len > 0),
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            top_n_sigma=self.top_n_sigma,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=tuple(bias),
            logprobs=None if self.num_logprobs < 0 else self.num_logprobs,
            allowed_token_ids=tuple(unpack_ids(self.allowed_ids).tolist()),
            bad_words_ids=tuple(tuple(unpack_ids(word).tolist()) for word in self.bad_words),
            no_repeat_ngram_size=self.no_repeat_ngram,
            top_p_decay=self.top_p_decay,
            top_p_min=self.top_p_min,
            top_p_reset_ids=tuple(unpack_ids(self.top_p_reset_ids).tolist()),
            return_generation_logits=self.returns_logits,
        )
        aged = pack_ids([NO_RESET] * (self.num_prompt + self.top_p_age))
        setup = RowSetup.of(
            self.row,
            self.num_prompt,
            sampling,
            self.history_ids or (aged if self.top_p_age else b""),
            min_len=self.min_len,
            stop_ids=unpack_ids(self.stop_ids).tolist(),
        )
        return msgspec.structs.replace(setup, adapter_slot=self.adapter_slot)


def numbers_of(setup: RowSetup) -> SimpleNamespace:
    """Its columns by name."""
    packed = np.frombuffer(setup.columns, ROW_DTYPE)[0]
    values = [*packed["floats"].tolist(), *packed["integers"].tolist()]
    return SimpleNamespace(**{c.name: value for c, value in zip((*FLOATS, *INTEGERS), values, strict=True)})
