"""``python -m bench.placement``."""

import sys

from bench.placement.command import main

if __name__ == "__main__":
    sys.exit(main())
