"""Planning: from two layouts to a path, with the states between them and the search."""

from rvdcomm.planning.binding import Binding, R, V, refine
from rvdcomm.planning.candidates import candidate_paths, direct_path
from rvdcomm.planning.path import State, exchange_step, groups_text, steps_of_bindings
from rvdcomm.planning.primitives import RebindPricer
from rvdcomm.planning.search_bound import least_of_any

__all__ = [
    "Binding",
    "R",
    "RebindPricer",
    "State",
    "V",
    "candidate_paths",
    "direct_path",
    "exchange_step",
    "groups_text",
    "least_of_any",
    "refine",
    "steps_of_bindings",
]
