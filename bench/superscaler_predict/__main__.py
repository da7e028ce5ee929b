"""``python -m bench.superscaler_predict``."""

import sys

from bench.superscaler_predict.command import main

if __name__ == "__main__":
    sys.exit(main())
