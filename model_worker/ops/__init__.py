"""One door to kernels: an Ops makes what layers compute with, by torch, C++ or Triton.

    load      selection.make_ops: device, attention backend, dtype, C++ library -> one Ops
    bind      each layer asks it once, when its weights are loaded: ops.linear(weight, ...) -> a callable
    forward   the layer calls that, and asks nothing

An Ops names what it could not do by its own kernels, and why, in its KernelTable. Another device, or
instruction set, is a folder of kernels, an Ops over it, and a branch in selection.
"""
