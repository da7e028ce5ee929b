"""``python -m bench.training``."""

import sys

from bench.training.command import main

if __name__ == "__main__":
    sys.exit(main())
