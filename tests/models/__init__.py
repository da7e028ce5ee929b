"""Models that others wrote: each is captured, and trains under every plan as on one device."""
