"""All planners on all cells: those of the paper's studies, Alpa's models and HiDup's models."""
