"""The CUDA kernels, in Triton. Each has the name of a torch function that defines its result.

Importing a module of this package needs triton; nothing else in the project imports it before a GPU is used.
Rows, pages and slots are addressed as in the torch code.
"""

from runtime.base.environment import allow_fp_fusion

# Every process that compiles a kernel passes here first, a server's or not.
allow_fp_fusion()
