"""Structures that C++ also defines, with which kernels are called; C++ describes their fields. STRUCTURES has
all of them: a library that was compiled for others is not loaded (layouts.py). row_field: the field with the
number of rows, tokens or outputs, which a recorded program (program.py) sets in each step.
"""

from __future__ import annotations

import ctypes

from model_worker.kernels.native.sample_calls import DrawCall, LogprobsCall, MaskCall, PenaltyCall
from model_worker.kernels.native.step_calls import ProgramCall, ProgramStep, StageCall, StepCall


class AttentionCall(ctypes.Structure):
    """Mirrors AttentionCall of attention_call.h, where the fields are described. Strides are in elements."""

    _fields_ = (
        ("q", ctypes.c_void_p),
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("k_pool", ctypes.c_void_p),
        ("v_pool", ctypes.c_void_p),
        ("cos_sin", ctypes.c_void_p),
        ("out_slots", ctypes.c_void_p),
        ("page_table", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("kv_lens", ctypes.c_void_p),
        ("query_start", ctypes.c_void_p),
        ("q_stride", ctypes.c_int64),
        ("k_stride", ctypes.c_int64),
        ("v_stride", ctypes.c_int64),
        ("page_table_stride", ctypes.c_int64),
        ("num_tokens", ctypes.c_int32),
        ("num_seqs", ctypes.c_int32),
        ("page_size", ctypes.c_int32),
        ("num_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
        ("force_float_math", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("deterministic", ctypes.c_int32),
    )
    row_field = "num_tokens"


class LinearCall(ctypes.Structure):
    """Mirrors LinearCall of linear_call.h."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("x_scale", ctypes.c_void_p),
        ("weight_scale", ctypes.c_void_p),
        ("weight_sum", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("num_rows", ctypes.c_int32),
        ("n", ctypes.c_int32),
        ("k", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("out_is_float", ctypes.c_int32),
        ("gate", ctypes.c_int32),
        ("is_symmetric", ctypes.c_int32),
        ("in_huge_pages", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
    )
    row_field = "num_rows"


class LoraPartTable(ctypes.Structure):
    """Mirrors LoraPart of lora.cpp."""

    _fields_ = (
        ("b", ctypes.c_void_p),
        ("column", ctypes.c_int32),
        ("columns", ctypes.c_int32),
        ("hidden", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("scale", ctypes.c_float),
    )


class LoraSlotTable(ctypes.Structure):
    """Mirrors LoraSlot of lora.cpp."""

    _fields_ = (
        ("a", ctypes.c_void_p),
        ("hidden_size", ctypes.c_int32),
        ("num_parts", ctypes.c_int32),
        ("parts", LoraPartTable * 3),
    )


class SortRowsCall(ctypes.Structure):
    """Mirrors SortRowsCall of lora.cpp."""

    _fields_ = (
        ("rows", ctypes.c_void_p),
        ("query_start", ctypes.c_void_p),
        ("row_slots", ctypes.c_void_p),
        ("order", ctypes.c_void_p),
        ("begins", ctypes.c_void_p),
        ("num_tokens", ctypes.c_int32),
        ("num_seqs", ctypes.c_int32),
        ("num_slots", ctypes.c_int32),
    )
    row_field = "num_tokens"


class LoraCall(ctypes.Structure):
    """Mirrors LoraCall of lora.cpp."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("hidden", ctypes.c_void_p),
        ("order", ctypes.c_void_p),
        ("begins", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("num_rows", ctypes.c_int32),
        ("n", ctypes.c_int32),
        ("k", ctypes.c_int32),
        ("max_hidden", ctypes.c_int32),
        ("num_slots", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
    )
    row_field = "num_rows"


class QuantizeCall(ctypes.Structure):
    """Mirrors QuantizeCall of linear_int8.cpp."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("num_rows", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
    )
    row_field = "num_rows"


class NormCall(ctypes.Structure):
    """Mirrors NormCall of elementwise.cpp."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("token_stride", ctypes.c_int64),
        ("tokens", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("weight_stride", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("weight_is_float", ctypes.c_int32),
        ("centers", ctypes.c_int32),
        ("is_wide", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
        ("eps", ctypes.c_float),
    )
    row_field = "tokens"


class ActivateCall(ctypes.Structure):
    """Mirrors ActivateCall of elementwise.cpp."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("rows", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("has_up", ctypes.c_int32),
        ("activation", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
    )
    row_field = "rows"


class CombineCall(ctypes.Structure):
    """Mirrors CombineCall of elementwise.cpp."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("add", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("rows", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("cap", ctypes.c_float),
    )
    row_field = "rows"


class ExpertProgram(ctypes.Structure):
    """Mirrors ExpertProgram of experts.cpp."""

    _fields_ = (("step", ctypes.c_void_p), ("y", ctypes.c_void_p))


class ExpertsCall(ctypes.Structure):
    """Mirrors ExpertsCall of experts.cpp."""

    _fields_ = (
        ("hidden", ctypes.c_void_p),
        ("scores", ctypes.c_void_p),
        ("outputs", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("programs", ctypes.c_void_p),
        ("num_tokens", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("score_stride", ctypes.c_int32),
        ("num_experts", ctypes.c_int32),
        ("num_per_token", ctypes.c_int32),
        ("chunk", ctypes.c_int32),
        ("renormalizes", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
    )
    row_field = "num_tokens"


class TakeCall(ctypes.Structure):
    """Mirrors TakeCall of rows.cpp."""

    _fields_ = (
        ("table", ctypes.c_void_p),
        ("index", ctypes.c_void_p),
        ("row_scale", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("row_bytes", ctypes.c_int64),
        ("num_rows", ctypes.c_int32),
        ("packed_bytes", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
    )
    row_field = "num_rows"


class RotaryCall(ctypes.Structure):
    """Mirrors RotaryCall of rows.cpp."""

    _fields_ = (
        ("positions", ctypes.c_void_p),
        ("frequencies", ctypes.c_void_p),
        ("amplitude", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("num_tokens", ctypes.c_int32),
        ("half", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
    )
    row_field = "num_tokens"


class ExchangeCall(ctypes.Structure):
    """Mirrors ExchangeCall of exchange.cpp."""

    _fields_ = (
        ("region", ctypes.c_void_p),
        ("data", ctypes.c_void_p),
        ("num_bytes", ctypes.c_int64),
        ("slot_bytes", ctypes.c_int64),
        ("spin_ns", ctypes.c_int64),
        ("wait_ns", ctypes.c_int64),
        ("round", ctypes.c_uint32),
        ("rank", ctypes.c_int32),
        ("num_ranks", ctypes.c_int32),
        ("is_posted", ctypes.c_int32),
        ("missing", ctypes.c_int32),
    )


class SumCall(ctypes.Structure):
    """Mirrors SumCall of exchange.cpp."""

    _fields_ = (
        ("slots", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("slot_bytes", ctypes.c_int64),
        ("num_ranks", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
    )


CALLS = (
    *(
        ActivateCall,
        AttentionCall,
        CombineCall,
        DrawCall,
        ExchangeCall,
        ExpertProgram,
        ExpertsCall,
        LinearCall,
    ),
    *(LogprobsCall, LoraCall, MaskCall, NormCall, PenaltyCall, ProgramCall, ProgramStep, QuantizeCall),
    *(RotaryCall, SortRowsCall, StageCall, StepCall, SumCall, TakeCall),
)
STRUCTURES: dict[str, type[ctypes.Structure]] = {
    "LoraPart": LoraPartTable,
    "LoraSlot": LoraSlotTable,
    **{call.__name__: call for call in CALLS},
}
"""Structures that C++ also defines, by their names there."""
ADAPTER_STRUCTURES = frozenset({"LoraPart", "LoraSlot", "LoraCall", "SortRowsCall"})
"""Structures of the library of adapters."""
