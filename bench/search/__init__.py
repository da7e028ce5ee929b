"""All planners on all cells: the paper's studies, Alpa's models and HiDup's."""
