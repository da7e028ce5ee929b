"""``python -m bench.vllm_update``."""

import sys

from bench.vllm_update.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
