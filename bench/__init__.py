"""Benchmarks of rvdcomm and superscaler_core, and the emulated cluster that some of them run on."""
