"""Start Carousel: `python launch.py --model DIR`, which is the command `carousel` of an installed one."""

from __future__ import annotations

import sys

from runtime.launcher.main import main

if __name__ == "__main__":
    sys.exit(main())
