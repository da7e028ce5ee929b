"""Page: a plan and its simulated step as one self-contained HTML page."""

from superscaler_core.page.candidate_row import CandidateRow
from superscaler_core.page.candidates_file import load_candidates, save_candidates
from superscaler_core.page.document import document_of
from superscaler_core.page.write import SUFFIXES, save_page

__all__ = [
    "SUFFIXES",
    "CandidateRow",
    "document_of",
    "load_candidates",
    "save_candidates",
    "save_page",
]
