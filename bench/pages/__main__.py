"""``python -m bench.pages``."""

import sys

from bench.pages.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
