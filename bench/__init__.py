"""Benchmarks of rvdcomm, and the emulated cluster which they run on."""
