"""python -m carousel.batch."""

from __future__ import annotations

import sys

from carousel.batch.main import main

sys.exit(main())
