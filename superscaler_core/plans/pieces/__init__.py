"""Pieces: code that several sPrograms share, one idea per file."""
