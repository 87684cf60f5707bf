"""`python -m tests.harness.pretended_gpu.interpreted MODULE ARGUMENT ...` runs a module whose kernels are
interpreted as in tests, without a GPU.
"""

from __future__ import annotations

import runpy
import sys

from tests.harness.pretended_gpu.interpreter import patched_once, shuffled_programs


def main() -> None:
    sys.argv = sys.argv[1:]
    with patched_once(), shuffled_programs():
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
