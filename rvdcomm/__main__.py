"""``python -m rvdcomm`` is the command line."""

import sys

if __name__ == "__main__":
    try:
        from rvdcomm.cli import main
    except KeyboardInterrupt:
        sys.exit(130)  # The imports take half a second, in which Ctrl-C is to leave no traceback.
    sys.exit(main())
