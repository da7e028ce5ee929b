"""``python -m superscaler_core``: the command line."""

from __future__ import annotations

import sys

from superscaler_core.cli import main

if __name__ == "__main__":
    sys.exit(main())
