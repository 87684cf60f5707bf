"""The C++ attention against attention in float64, key by key; and what its result may not depend on."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from model_worker.attention.base import AttentionInputs, AttentionLayer
from model_worker.attention.cpu_native import CpuNativeAttention
from model_worker.attention.forward_batch import ForwardBatch
from model_worker.kernels.native.library import NativeKernels, attention_supports
from model_worker.memory.kv_pool import MHATokenToKVPool
from runtime.base.cpu_isa import CpuIsa, cpu_isa
from tests.harness.models.native import ISA_WITHOUT_AMX, LEAST_ISA, native_kernels, needs_compiler

pytestmark = needs_compiler

# Of the result's norm. bfloat16 has 8 bits: 2^-9 for q, k and v it is given exactly, so what is left is the
# rounding of the result (2^-9) and of the weights (2^-9 each, which average out).
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
# (cached tokens, new tokens): decodes around blocks of 64 and splits of 256, chunks, whole prompts.
MIXED = [
    (0, 1),
    (62, 1),
    (63, 1),
    (64, 1),
    (254, 1),
    (256, 1),
    (700, 1),
    (0, 20),
    (33, 9),
    (5, 128),
    (300, 129),
]


@dataclass
class Sequence:
    """A sequence whose first num_cached tokens are in the pool and whose others are new."""

    q: Tensor  # [new, heads, head_dim]
    k: Tensor  # [cached + new, kv_heads, head_dim]
    v: Tensor

    @property
    def num_new(self) -> int:
        return self.q.shape[0]

    @property
    def num_cached(self) -> int:
        return self.k.shape[0] - self.num_new

    def tail(self, num_new: int) -> Sequence:
        return Sequence(self.q[-num_new:], self.k, self.v)

    def head(self, num_tokens: int, num_new: int) -> Sequence:
        cut = self.num_new - (self.k.shape[0] - num_tokens)
        return Sequence(self.q[cut - num_new : cut], self.k[:num_tokens], self.v[:num_tokens])


@dataclass(frozen=True)
class Variant:
    """A way to compute: which library, whether its bfloat16 instructions are used, what is promised."""

    isa: CpuIsa
    force_float_math: bool = False
    deterministic: bool = False

    def backend(self) -> CpuNativeAttention:
        kernels: NativeKernels = native_kernels(self.isa)
        return CpuNativeAttention(
            kernels, deterministic=self.deterministic, force_float_math=self.force_float_math
        )


NATIVE = Variant(cpu_isa())
# On a CPU with few instructions some are the same.
_DETERMINISTIC = [
    Variant(cpu_isa(), deterministic=True),
    Variant(cpu_isa(), force_float_math=True, deterministic=True),
    Variant(ISA_WITHOUT_AMX, deterministic=True),
    Variant(LEAST_ISA, deterministic=True),
]
DETERMINISTIC = list(dict.fromkeys(_DETERMINISTIC))
VARIANTS = [NATIVE, *DETERMINISTIC]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _layer(heads: int, kv_heads: int, head_dim: int = 64, window: int | None = None) -> AttentionLayer:
    return AttentionLayer(0, heads, kv_heads, head_dim, head_dim**-0.5, window)


def _sequences(
    layer: AttentionLayer, shapes: ListLike[tuple[int, int]], dtype: torch.dtype = torch.float32
) -> list[Sequence]:
    generator = torch.Generator().manual_seed(1)

    def normal(tokens: int, heads: int) -> Tensor:
        return torch.randn(tokens, heads, layer.head_dim, generator=generator).to(dtype)

    return [
        Sequence(
            normal(new, layer.num_heads),
            normal(cached + new, layer.num_kv_heads),
            normal(cached + new, layer.num_kv_heads),
        )
        for cached, new in shapes
    ]


def _attend(
    layer: AttentionLayer, sequences: ListLike[Sequence], variant: Variant = NATIVE, page_size: int = 16
) -> list[Tensor]:
    """Put the cached tokens on scattered pages and run the backend over all sequences in one batch."""
    num_tokens = [seq.num_new for seq in sequences]
    kv_lens = [seq.k.shape[0] for seq in sequences]
    max_pages = -(-max(kv_lens) // page_size)
    num_pages = max_pages * len(sequences)
    pages = torch.randperm(num_pages, generator=torch.Generator().manual_seed(page_size)) + 1
    page_table = torch.zeros(len(sequences) + 2, max_pages + 1, dtype=torch.int32)
    rows = torch.arange(len(sequences)).flip(0) + 1
    page_table[rows, :max_pages] = pages.to(torch.int32).view(len(sequences), max_pages)
    dtype = sequences[0].q.dtype
    pool = MHATokenToKVPool(num_pages, page_size, 1, layer.num_kv_heads, layer.head_dim, dtype, "cpu")
    for buffer in pool.layer(0):
        buffer.fill_(float("nan"))  # a slot nobody stored must not be read, not even times 0
    new_slots = []
    for row, seq in zip(rows.tolist(), sequences, strict=True):
        token = torch.arange(seq.k.shape[0])
        slots = page_table[row, token // page_size].long() * page_size + token % page_size
        # Pages of what no new token sees may be another sequence's by now: what is there is as good as NaN.
        first = max(0, seq.num_cached + 1 - layer.sliding_window) if layer.sliding_window else 0
        seen = slice(first, seq.num_cached)
        pool.store(0, seq.k[seen], seq.v[seen], slots[seen])
        new_slots.append(slots[seq.num_cached :])
    batch = ForwardBatch(
        input_ids=torch.zeros(sum(num_tokens), dtype=torch.int64),
        positions=torch.cat([torch.arange(seq.num_cached, seq.k.shape[0]) for seq in sequences]),
        out_slots=torch.cat(new_slots),
        query_start=[0, *accumulate(num_tokens)],
        kv_lens=kv_lens,
        rows=rows,
        page_table=page_table,
        page_size=page_size,
        num_decodes=0,
        output_indices=torch.zeros(0, dtype=torch.int64),
    )
    backend = variant.backend()
    backend.prepare(batch)
    # As a fused projection gives them: side by side, so that a token's rows lie apart.
    fused = torch.cat(
        [torch.cat((seq.q, seq.k[seq.num_cached :], seq.v[seq.num_cached :]), dim=1) for seq in sequences]
    )
    q, k, v = fused.split((layer.num_heads, layer.num_kv_heads, layer.num_kv_heads), dim=1)
    out = backend.forward(layer, AttentionInputs(q, k, v), batch, pool)
    k_buffer, v_buffer = pool.layer(0)
    assert torch.equal(k_buffer[batch.out_slots], k)
    assert torch.equal(v_buffer[batch.out_slots], v)
    assert out.is_contiguous()
    return list(out.split(num_tokens))


def _dense(layer: AttentionLayer, seq: Sequence) -> Tensor:
    """Every query over the keys it may see, in float64."""
    group = layer.num_heads // layer.num_kv_heads
    k = seq.k.double().repeat_interleave(group, dim=1)
    v = seq.v.double().repeat_interleave(group, dim=1)
    position = torch.arange(seq.num_cached, seq.k.shape[0]).unsqueeze(1)
    key = torch.arange(seq.k.shape[0])
    hidden = key > position
    if layer.sliding_window is not None:
        hidden |= key <= position - layer.sliding_window
    scores = torch.einsum("qhd,khd->hqk", seq.q.double(), k) * layer.scale
    if layer.softcap is not None:
        scores = layer.softcap * (scores / layer.softcap).tanh()
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


def _check(
    layer: AttentionLayer,
    sequences: list[Sequence],
    variant: Variant = NATIVE,
    page_size: int = 16,
    *,
    tolerance: float | None = None,
) -> None:
    limit = TOLERANCE[sequences[0].q.dtype] if tolerance is None else tolerance
    for seq, got in zip(sequences, _attend(layer, sequences, variant, page_size), strict=True):
        expected = _dense(layer, seq)
        assert (got.double() - expected).norm() / expected.norm() < limit


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 1, 8, 100, 1000])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_mixed_batch_equals_dense_attention(
    page_size: int, window: int | None, dtype: torch.dtype, variant: Variant
) -> None:
    layer = _layer(6, 2, 64, window)
    _check(layer, _sequences(layer, MIXED, dtype), variant, page_size)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("softcap", [2.5, 50.0])
def test_a_soft_cap_bends_the_scores_before_the_softmax(
    softcap: float, window: int | None, dtype: torch.dtype, variant: Variant
) -> None:
    """In float32 a capped score is good to about softcap times 1e-7: so are the weights."""
    layer = AttentionLayer(0, 6, 2, 64, 1.0, window, softcap=softcap)
    sequences = _sequences(layer, MIXED, dtype)
    _check(layer, sequences, variant, tolerance=TOLERANCE[dtype] + 1e-7 * softcap)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [16, 48, 64, 80, 96, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (14, 2), (9, 1)])
def test_every_supported_shape_equals_dense_attention(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, variant: Variant
) -> None:
    assert attention_supports(dtype, head_dim)
    layer = _layer(heads, kv_heads, head_dim)
    _check(layer, _sequences(layer, [(300, 1), (0, 1), (70, 41)], dtype), variant)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("page_size", [16, 24, 32])
def test_a_decode_s_few_rows_equal_dense_attention(page_size: int, window: int | None) -> None:
    """1 to 9 queries of a key head, around groups of 16 tokens, pairs of groups, blocks and splits."""
    shapes = [
        *((cached, 1) for cached in (0, 14, 15, 16, 31, 32, 47, 63, 79, 255, 271, 300)),
        (20, 2),
        (253, 4),
    ]
    for heads in (1, 2, 3, 4, 5, 8, 9):
        layer = _layer(heads, 1, 96, window)
        _check(layer, _sequences(layer, shapes, torch.bfloat16), NATIVE, page_size)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window", "page_size"),
    [(5, 5, 64, None, 16), (14, 2, 64, 300, 16), (9, 3, 96, 40, 3), (24, 24, 16, None, 1), (6, 6, 32, 8, 24)],
)
def test_many_decodes_have_the_bits_of_each_alone(
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int | None,
    page_size: int,
    dtype: torch.dtype,
    variant: Variant,
) -> None:
    """Many decodes take several key heads in one task, and what a task reads next is asked for; one alone
    takes a head and a split at a time. Lengths around groups, blocks and splits, and with them two chunks.
    """
    layer = _layer(heads, kv_heads, head_dim, window)
    shapes = [
        (cached, 1) for cached in (0, 14, 15, 16, 62, 63, 64, 65, 254, 255, 256, 257, 511, 512, 600)
    ] * 3
    sequences = _sequences(layer, [*shapes, (253, 5), (70, 41)], dtype)
    together = _attend(layer, sequences, variant, page_size)
    torch.set_num_threads(2)
    for got, shared in zip(together, _attend(layer, sequences, variant, page_size), strict=True):
        assert torch.equal(got, shared)
    torch.set_num_threads(1)  # a second one would turn idly between these small tasks
    for seq, got in list(zip(sequences, together, strict=True))[30:]:
        expected = _dense(layer, seq)
        assert (got.double() - expected).norm() / expected.norm() < TOLERANCE[dtype]
        (alone,) = _attend(layer, [seq], variant, page_size)
        assert torch.equal(alone, got)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_more_heads_than_a_tile_has_rows_share_a_key_head(dtype: torch.dtype) -> None:
    layer = _layer(71, 1, 256)
    _check(layer, _sequences(layer, [(300, 1), (10, 3)], dtype))


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize(
    ("dtype", "largest", "tolerance"),
    # Where float32 has steps of 6e-5; that is the relative error of a weight.
    [(torch.float32, 800.0, 1e-4), (torch.bfloat16, 1e4, TOLERANCE[torch.bfloat16])],
)
def test_scores_far_apart_neither_overflow_nor_lose_the_largest(
    dtype: torch.dtype, largest: float, tolerance: float, variant: Variant
) -> None:
    layer = _layer(2, 1)
    sequences = _sequences(layer, [(600, 1), (600, 3), (600, 9), (600, 40)], dtype)
    for seq in sequences:
        seq.k *= largest / 4
    _check(layer, sequences, variant, tolerance=tolerance)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 8, 300])
def test_a_sequence_is_bit_equal_alone_and_in_any_batch_page_size_and_number_of_threads(
    window: int | None, dtype: torch.dtype, variant: Variant
) -> None:
    layer = _layer(6, 2, 64, window)
    sequences = _sequences(layer, MIXED, dtype)
    batched = _attend(layer, sequences, variant, page_size=16)
    reversed_order = _attend(layer, sequences[::-1], variant, page_size=1)[::-1]
    for seq, together, backwards in zip(sequences, batched, reversed_order, strict=True):
        assert torch.equal(together, backwards)
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            (alone,) = _attend(layer, [seq], variant, page_size=4)
            assert torch.equal(alone, together)


@pytest.mark.parametrize("variant", DETERMINISTIC, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 8, 300])
def test_a_token_is_bit_equal_in_a_decode_in_a_chunk_and_in_a_whole_prompt(
    window: int | None, dtype: torch.dtype, variant: Variant
) -> None:
    layer = _layer(14, 2, 64, window)
    (whole,) = _sequences(layer, [(0, 570)], dtype)
    (expected,) = _attend(layer, [whole], variant)
    torch.set_num_threads(2)
    for end, num_new in ((570, 1), (570, 13), (569, 2), (513, 1), (512, 100), (257, 1), (64, 1), (1, 1)):
        (got,) = _attend(layer, [whole.head(end, num_new)], variant)
        assert torch.equal(got, expected[end - num_new : end]), (end, num_new)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_an_empty_batch_attends_to_nothing(variant: Variant) -> None:
    layer = _layer(4, 2)
    pool = MHATokenToKVPool(1, 4, 1, 2, 64, torch.float32, "cpu")
    none = torch.zeros(0, dtype=torch.int64)
    batch = ForwardBatch(none, none, none, [0], [], none, torch.zeros(1, 1, dtype=torch.int32), 4, 0, none)
    backend = variant.backend()
    backend.prepare(batch)
    empty = torch.zeros(0, 2, 64)
    nothing = AttentionInputs(torch.zeros(0, 4, 64), empty, empty)
    assert backend.forward(layer, nothing, batch, pool).shape == (0, 4, 64)


def test_other_dtypes_and_head_sizes_are_not_claimed() -> None:
    assert attention_supports(torch.float16, 64)
    assert not attention_supports(torch.float64, 64)
    assert not attention_supports(torch.float32, 8)
    assert not attention_supports(torch.float32, 72)
    assert not attention_supports(torch.float32, 512)
