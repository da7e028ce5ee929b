"""Codegen: prints a step program as one readable Python file per rank."""

from superscaler_core.codegen.rank_file import rank_file, rank_files

__all__ = ["rank_file", "rank_files"]
