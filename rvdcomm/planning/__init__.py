"""Planning: from two layouts to a path, with the states between them and the search."""

from rvdcomm.planning.candidates import candidate_paths, direct_path
from rvdcomm.planning.path import State, groups_text

__all__ = ["State", "candidate_paths", "direct_path", "groups_text"]
