"""python -m bench_serving."""

from __future__ import annotations

import sys

from bench_serving.main import main

sys.exit(main())
