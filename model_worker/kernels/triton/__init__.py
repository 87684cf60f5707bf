"""The CUDA kernels, in Triton: each beside the torch function of the same name, which defines its result.

Importing a module of this package needs triton; nothing else in the project imports it before a GPU is used.
Pointers address rows, pages and slots as the torch code does, so a kernel changes nothing but the speed.
"""

from runtime.base.environment import allow_fp_fusion

# Every process that compiles a kernel passes here first, a server's or not.
allow_fp_fusion()
