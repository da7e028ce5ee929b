"""Codegen: one readable Python file a rank."""

from superscaler_core.codegen.rank_file import rank_files

__all__ = ["rank_files"]
