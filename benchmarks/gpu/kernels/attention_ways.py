"""Prompt attention by the kernels of several libraries, over the same pages.

For a library that reads no pages, keys and values are gathered first. If its causal mask starts at the upper
left corner, the cached tokens are attended without a mask and the new ones with it, and the two results are
merged by the logarithms of their sums. All of this is in the time. NOTE: FlashAttention 4 and the cuDNN
frontend are called as their sources say; no test has run them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.kernels.kernel_rates import ExtendWork

aten = torch.ops.aten
Run = Callable[[], Tensor]
"""Function that returns the attention output of the new tokens, [T, num_heads, D]."""


class Partial(NamedTuple):
    """Attention to some of the keys."""

    out: Tensor  # [B, num_heads, n, D]
    log_sums: Tensor  # [B, num_heads, n] of the exponentials


Attend = Callable[[Tensor, Tensor, Tensor, bool], Partial]
"""Function that attends q [B, num_heads, n, D] to k, v [B, num_kv_heads, m, D]; with a causal mask n equals
m.
"""


def triton(work: ExtendWork) -> Run:
    def run() -> Tensor:
        work.run()
        return work.out

    return run


def torch_cudnn(work: ExtendWork, *, repeats: bool = False) -> Run:
    """Return cuDNN's kernel as torch calls it. repeats: repeat keys and values for each query head."""

    def attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Partial:
        op = aten._scaled_dot_product_cudnn_attention
        out, log_sums, *_ = op(q, k, v, None, True, is_causal=is_causal, scale=work.scale)
        return Partial(out, log_sums.view(q.shape[:3]))

    return in_two_parts(work, attend, repeats=repeats)


def torch_cpu_flash(work: ExtendWork, *, repeats: bool = False) -> Run:
    """Return torch's kernel for a CPU."""

    def attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Partial:
        op = aten._scaled_dot_product_flash_attention_for_cpu
        return Partial(*op(q, k, v, is_causal=is_causal, scale=work.scale))

    return in_two_parts(work, attend, repeats=repeats)


def torch_flash2(work: ExtendWork) -> Run:
    """Return torch's FlashAttention 2, whose mask starts at the lower right corner."""
    slots = slots_of(work)
    key_starts = (work.lens[0] * torch.arange(work.num_seqs + 1, device=work.q.device)).int()
    most = work.num_new + work.num_cached

    def run() -> Tensor:
        k, v = (pool[slots] for pool in work.pages[:2])
        lengths = (work.starts, key_starts, work.num_new, most)
        op = aten._flash_attention_forward
        out: Tensor = op(work.q, k, v, *lengths, 0.0, True, False, scale=work.scale)[0]
        return out

    return run


def flash_attention_4(work: ExtendWork) -> Run:
    from flash_attn.cute import flash_attn_varlen_func

    k, v = by_page(work)

    def run() -> Tensor:
        result = flash_attn_varlen_func(
            work.q,
            k,
            v,
            cu_seqlens_q=work.starts,
            max_seqlen_q=work.num_new,
            max_seqlen_k=work.num_new + work.num_cached,
            seqused_k=work.lens,
            page_table=work.pages.page_table,
            softmax_scale=work.scale,
            causal=True,
        )
        out: Tensor = result[0] if isinstance(result, tuple) else result  # as the version has it
        return out

    return run


def flashinfer(work: ExtendWork) -> Run:
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    q, table = work.q, work.pages.page_table
    wrapper = BatchPrefillWithPagedKVCacheWrapper(q.new_empty(128 << 20, dtype=torch.uint8), "NHD")
    k, v = by_page(work)
    wrapper.plan(
        work.starts.cpu(),
        table.shape[1] * torch.arange(work.num_seqs + 1, dtype=torch.int32),
        table.flatten(),
        ((work.lens - 1) % work.page_size + 1).cpu(),
        q.shape[1],
        k.shape[2],
        q.shape[2],
        work.page_size,
        causal=True,
        sm_scale=work.scale,
        q_data_type=q.dtype,
        kv_data_type=k.dtype,
    )

    def run() -> Tensor:
        out: Tensor = wrapper.run(q, (k, v))
        return out

    return run


def cudnn_frontend(work: ExtendWork) -> Run:
    """Return cuDNN with pages and a mask from the lower right corner, which torch does not use."""
    import cudnn

    pack = _cudnn_tensors(work)
    dtype = {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float16: cudnn.data_type.HALF}[work.q.dtype]
    wide = cudnn.data_type.FLOAT
    handle = cudnn.create_handle()
    graph = cudnn.pygraph(
        io_data_type=dtype, intermediate_data_type=wide, compute_data_type=wide, handle=handle
    )
    nodes = {name: graph.tensor_like(tensor) for name, tensor in pack.items() if name != "out"}
    out, _ = graph.sdpa(
        name="sdpa",
        q=nodes["q"],
        k=nodes["k"],
        v=nodes["v"],
        is_inference=True,
        attn_scale=work.scale,
        use_causal_mask_bottom_right=True,
        use_padding_mask=True,
        seq_len_q=nodes["seq_len_q"],
        seq_len_kv=nodes["seq_len_kv"],
        paged_attention_k_table=nodes["k_table"],
        paged_attention_v_table=nodes["v_table"],
        paged_attention_max_seq_len_kv=work.num_new + work.num_cached,
    )
    out.set_output(True).set_dim(list(pack["out"].shape)).set_stride(list(pack["out"].stride()))
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    space = torch.empty(graph.get_workspace_size(), device=work.q.device, dtype=torch.uint8)
    given = {node: pack[name] for name, node in nodes.items()} | {out: pack["out"]}

    def run() -> Tensor:
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
        graph.execute(given, space, handle=handle)
        return pack["out"].transpose(1, 2).reshape(work.q.shape)

    return run


def _cudnn_tensors(work: ExtendWork) -> dict[str, Tensor]:
    """Return the tensors in cuDNN's order of dimensions: batch or page, heads, tokens, width."""
    q = work.q.view(work.num_seqs, work.num_new, *work.q.shape[1:]).transpose(1, 2)
    k, v = (pool.transpose(1, 2) for pool in by_page(work))
    table = work.pages.page_table.view(work.num_seqs, 1, -1, 1)
    lens = work.lens.view(-1, 1, 1, 1)
    return {
        "q": q,
        "k": k,
        "v": v,
        "seq_len_q": torch.full_like(lens, work.num_new),
        "seq_len_kv": lens,
        "k_table": table,
        "v_table": table.clone(),
        "out": torch.empty_like(q),
    }


WAYS: dict[str, Callable[[ExtendWork], Run]] = {
    "triton": triton,
    "torch cudnn": torch_cudnn,
    "torch cudnn, keys repeated": partial(torch_cudnn, repeats=True),
    "torch flash-attention 2": torch_flash2,
    "flash-attention 4": flash_attention_4,
    "cudnn-frontend": cudnn_frontend,
    "flashinfer": flashinfer,
}
"""Kernels for a GPU; the first is the one that a server uses."""
CPU_WAYS: dict[str, Callable[[ExtendWork], Run]] = {
    "triton": triton,
    "torch for a CPU": torch_cpu_flash,
    "torch for a CPU, keys repeated": partial(torch_cpu_flash, repeats=True),
}


def slots_of(work: ExtendWork) -> Tensor:
    """Return the KV slots of all tokens, one sequence after the other."""
    place = torch.arange(work.num_new + work.num_cached, device=work.q.device)
    page = work.pages.page_table[:, place // work.page_size]
    return (page * work.page_size + place % work.page_size).flatten()


def by_page(work: ExtendWork) -> tuple[Tensor, Tensor]:
    """Return keys and values as [pages, page_size, num_kv_heads, D]."""
    k, v = (pool.view(-1, work.page_size, *pool.shape[1:]) for pool in work.pages[:2])
    return k, v


def in_two_parts(work: ExtendWork, attend: Attend, *, repeats: bool) -> Run:
    """Return a function that gathers, attends to cached tokens, if any, and to the chunk itself, and merges
    the results.
    """
    slots = slots_of(work)
    q = work.q.view(work.num_seqs, work.num_new, *work.q.shape[1:]).transpose(1, 2)

    def gathered(pool: Tensor) -> Tensor:
        heads = pool[slots].view(work.num_seqs, -1, *pool.shape[1:]).transpose(1, 2)
        return heads.repeat_interleave(q.shape[1] // heads.shape[1], dim=1) if repeats else heads

    def run() -> Tensor:
        k, v = gathered(work.pages.k_pool), gathered(work.pages.v_pool)
        cached = slice(work.num_cached)
        new = slice(work.num_cached, None)
        result = attend(q, k[:, :, new], v[:, :, new], True)
        if work.num_cached:
            result = merged(attend(q, k[:, :, cached], v[:, :, cached], False), result)
        return result.out.transpose(1, 2).reshape(work.q.shape)

    return run


def merged(a: Partial, b: Partial) -> Partial:
    """Return the attention to the keys of both."""
    log_sums = torch.logaddexp(a.log_sums, b.log_sums)
    out = sum((each.log_sums - log_sums).exp().unsqueeze(-1) * each.out for each in (a, b))
    assert isinstance(out, Tensor)
    return Partial(out.to(a.out.dtype), log_sums)
