"""Pieces: what several sPrograms are made of, an idea a file."""
