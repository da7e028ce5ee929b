"""One half of a batch computes, the other communicates: ``python -m bench.superscaler_duplex``."""
