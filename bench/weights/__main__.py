"""``python -m bench.weights``."""

import sys

from bench.weights.command import main

if __name__ == "__main__":
    sys.exit(main())
