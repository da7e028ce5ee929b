"""``python -m bench.superscaler_duplex``."""

import sys

from bench.superscaler_duplex.command import main

if __name__ == "__main__":
    sys.exit(main())
