"""Groups of processes on this machine, or on hosts that this machine emulates."""
