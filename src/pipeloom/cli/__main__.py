"""``python -m pipeloom.cli`` is ``pipeloom``."""

from __future__ import annotations

import sys

from pipeloom.cli import main

if __name__ == "__main__":
    sys.exit(main())
