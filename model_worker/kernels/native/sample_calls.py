"""Arguments of the kernels on rows of logits, as C++ reads them."""

from __future__ import annotations

import ctypes


class DrawCall(ctypes.Structure):
    """Mirrors DrawCall of sample.cpp."""

    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("floats", ctypes.c_void_p),
        ("integers", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("num_rows", ctypes.c_int32),
        ("vocab_size", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
    )


class LogprobsCall(ctypes.Structure):
    """Mirrors LogprobsCall of logits.cpp."""

    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("chosen", ctypes.c_void_p),
        ("ranks", ctypes.c_void_p),
        ("top_ids", ctypes.c_void_p),
        ("top", ctypes.c_void_p),
        ("num_rows", ctypes.c_int32),
        ("vocab_size", ctypes.c_int32),
        ("num_top", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
    )


class PenaltyCall(ctypes.Structure):
    """Mirrors PenaltyCall of logits.cpp."""

    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("table_rows", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
        ("floats", ctypes.c_void_p),
        ("num_rows", ctypes.c_int32),
        ("vocab_size", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
    )


class MaskCall(ctypes.Structure):
    """Mirrors MaskCall of logits.cpp."""

    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("words", ctypes.c_void_p),
        ("num_rows", ctypes.c_int32),
        ("vocab_size", ctypes.c_int32),
        ("num_words", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
    )
