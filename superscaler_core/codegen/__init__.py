"""Codegen: prints a step program as one readable Python file per rank."""

from superscaler_core.codegen.rank_file import functions_of, rank_files, rank_text
from superscaler_core.codegen.table_text import tables_of

__all__ = ["functions_of", "rank_files", "rank_text", "tables_of"]
