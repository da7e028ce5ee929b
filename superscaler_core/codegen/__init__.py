"""Codegen: prints a step program as one readable Python file per rank."""

from superscaler_core.codegen.rank_file import rank_files, rank_text

__all__ = ["rank_files", "rank_text"]
