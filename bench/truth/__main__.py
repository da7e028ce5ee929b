"""``python -m bench.truth``."""

import sys

from bench.truth.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
