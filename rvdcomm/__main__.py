"""``python -m rvdcomm`` is the command line."""

import sys

from rvdcomm.cli import main

sys.exit(main())
