"""``python -m bench.hidup``."""

import sys

from bench.hidup.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
