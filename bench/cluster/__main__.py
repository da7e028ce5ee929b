"""``python -m bench.cluster``."""

import sys

from bench.cluster.emulated import main

if __name__ == "__main__":
    sys.exit(main())
