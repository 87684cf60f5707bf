"""Ops: the interface through which layers get their kernels, by torch, C++ or Triton.

    load      selection.make_ops: device, attention backend, dtype, C++ library -> one Ops
    bind      each layer asks once, when its weights are loaded: ops.linear(weight, ...) -> a callable
    forward   the layer calls that, and asks nothing

An Ops records in its KernelTable what it has no kernel for, and why. Support for another device or
instruction set is a folder of kernels, an Ops over it, and a branch in selection.
"""
