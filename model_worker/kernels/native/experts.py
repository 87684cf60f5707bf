"""NativeExperts: a mixture of experts as one kernel, which runs each expert's own kernels on its rows."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from model_worker.kernels.native.calls import ExpertProgram, ExpertsCall
from model_worker.kernels.native.library import NativeKernels
from model_worker.kernels.native.program import Arena, Program

# Rows of an expert's program. More tokens take several runs. Enough for a weight to be read rarely.
CHUNK = 256


@dataclass(slots=True)
class ExpertScratch:
    """Input tensor and arena that all experts of all layers share, since one expert computes at a time."""

    x: Tensor  # [CHUNK, hidden_size]
    arena: Arena = field(default_factory=Arena)


class NativeExperts:
    """Implementation of kernels.experts.mix_experts as one kernel. A token's result has the same bits in any
    batch.
    """

    batch_invariant = True

    def __init__(
        self,
        kernels: NativeKernels,
        run_expert: Callable[[int, Tensor], Tensor],
        scratch: ExpertScratch,
        *,
        num_experts: int,
        num_per_token: int,
        renormalizes: bool,
        packs_weight: bool,
    ) -> None:
        """run_expert(e, x): returns expert e's output for rows x [n, hidden_size]. Raises NotRecordable if
        that does not consist of kernels only.
        """
        self.packs_weight = packs_weight
        self._kept = run_expert  # the programs point into its weights
        self._programs = [
            Program(
                kernels,
                partial(run_expert, expert, scratch.x),
                scratch,
                num_tokens=CHUNK,
                num_outputs=0,
                num_seqs=0,
                arena=scratch.arena,
            )
            for expert in range(num_experts)
        ]
        self._table = (ExpertProgram * num_experts)(
            *(ExpertProgram(program.step_at, program.result(CHUNK).data_ptr()) for program in self._programs)
        )
        self._run = kernels.experts
        self._num_per_token = num_per_token
        self._call = ExpertsCall(
            x=scratch.x.data_ptr(),
            programs=ctypes.addressof(self._table),
            size=scratch.x.shape[1],
            num_experts=num_experts,
            num_per_token=num_per_token,
            chunk=CHUNK,
            renormalizes=renormalizes,
            dtype=kernels.number_of(scratch.x.dtype),
            num_threads=torch.get_num_threads(),
        )

    def __call__(self, hidden: Tensor, scores: Tensor) -> Tensor:
        """Return [T, hidden_size] for hidden [T, hidden_size] and the router's scores [T, num_experts or
        more].
        """
        assert hidden.is_contiguous()
        assert scores.stride(1) == 1
        assert scores.dtype is hidden.dtype
        outputs = torch.empty(len(hidden), self._num_per_token * hidden.shape[1], dtype=hidden.dtype)
        out = torch.empty(hidden.shape, dtype=hidden.dtype)
        call = self._call
        call.hidden = hidden.data_ptr()
        call.scores = scores.data_ptr()
        call.outputs = outputs.data_ptr()
        call.out = out.data_ptr()
        call.num_tokens = len(hidden)
        call.score_stride = scores.stride(0)
        self._run(call)
        return out
