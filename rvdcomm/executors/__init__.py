"""Executors: ways to run a program."""
