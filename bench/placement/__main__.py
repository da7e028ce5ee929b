"""``python -m bench.placement``."""

import sys

import torch

from bench.placement.command import main

if __name__ == "__main__":
    # Tensors are so small that threads would mostly wait for each other.
    torch.set_num_threads(1)
    sys.exit(main())
