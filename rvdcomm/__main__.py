"""``python -m rvdcomm`` is the command line."""

import sys

from rvdcomm.cli import main

if __name__ == "__main__":
    sys.exit(main())
