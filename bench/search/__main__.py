"""``python -m bench.search``."""

import sys

from bench.search.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
