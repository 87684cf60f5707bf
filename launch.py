"""Start Carousel: `python launch.py --model DIR`, which is the command `carousel` of an installed one."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    try:
        from runtime.launcher.main import main

        sys.exit(main())
    except KeyboardInterrupt:  # while modules are imported, which takes a second
        sys.exit(0)
