"""Ranks of one machine that read each other's memory on GPUs."""
