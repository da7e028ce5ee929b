"""TeraPipe: pipelines of slices of the sequence, and the best slices (Li et al., 2021)."""

from superscaler_core.published.terapipe.plan import terapipe
from superscaler_core.published.terapipe.schedule import terapipe_edges
from superscaler_core.published.terapipe.slices import SliceCut, cut_slices, pipeline_secs

__all__ = ["SliceCut", "cut_slices", "pipeline_secs", "terapipe", "terapipe_edges"]
