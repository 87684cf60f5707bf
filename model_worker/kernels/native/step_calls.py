"""Arguments of a recorded step, as C++ reads them: staging of a plan, a program of kernels, the draw."""

from __future__ import annotations

import ctypes


class ProgramCall(ctypes.Structure):
    """Mirrors ProgramCall of program.h."""

    _fields_ = (
        ("run", ctypes.c_void_p),
        ("call", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("outputs", ctypes.c_void_p),
        ("seqs", ctypes.c_void_p),
        ("condition", ctypes.c_void_p),
        ("is_nonzero", ctypes.c_int32),
    )


class ProgramStep(ctypes.Structure):
    """Mirrors ProgramStep of program.h."""

    _fields_ = (
        ("calls", ctypes.c_void_p),
        ("num_calls", ctypes.c_int32),
        ("tokens", ctypes.c_int32),
        ("outputs", ctypes.c_int32),
        ("seqs", ctypes.c_int32),
    )


class StageCall(ctypes.Structure):
    """Mirrors StageCall of stage.h. Fields from a plan contain the plan's bytes."""

    _fields_ = (
        ("spans", ctypes.c_char_p),
        ("pages", ctypes.c_char_p),
        ("rows", ctypes.c_char_p),
        ("starts", ctypes.c_char_p),
        ("token_ids", ctypes.c_char_p),
        ("lens", ctypes.c_char_p),
        ("samples", ctypes.c_char_p),
        ("drafts", ctypes.c_char_p),
        ("last_token", ctypes.c_void_p),
        ("page_table", ctypes.c_void_p),
        ("ids", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("out_slots", ctypes.c_void_p),
        ("seq_rows", ctypes.c_void_p),
        ("kv_lens", ctypes.c_void_p),
        ("query_start", ctypes.c_void_p),
        ("sample_indices", ctypes.c_void_p),
        ("sample_rows", ctypes.c_void_p),
        ("sample_positions", ctypes.c_void_p),
        ("guesses", ctypes.c_void_p),
        ("num_spans", ctypes.c_int32),
        ("num_pages", ctypes.c_int32),
        ("num_seqs", ctypes.c_int32),
        ("num_decodes", ctypes.c_int32),
        ("num_tokens", ctypes.c_int32),
        ("max_rows", ctypes.c_int32),
        ("max_pages", ctypes.c_int32),
        ("page_size", ctypes.c_int32),
        ("num_sampled", ctypes.c_int32),
    )


class StepCall(ctypes.Structure):
    """Mirrors StepCall of program.cpp."""

    _fields_ = (
        ("stage", ctypes.c_void_p),
        ("program", ctypes.c_void_p),
        ("draw", ctypes.c_void_p),
        ("features", ctypes.c_void_p),
        ("last_token", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("drawable", ctypes.c_int32),
        ("is_drawn", ctypes.c_int32),
        ("max_threads", ctypes.c_int32),
        ("num_limited", ctypes.c_int32),
    )
