"""Models of the comparison have as many parameters as Alpa states."""

from __future__ import annotations

import pytest

from bench.cells.workload import num_parameters
from bench.search.models import ALPA_MODELS


@pytest.mark.parametrize(
    "name", ["gpt-2.6b", "gpt-6.7b", "moe-2.4b", "moe-10b", "wresnet-2b", "wresnet-6.8b"]
)
def test_model_has_the_parameter_count_of_its_name(name: str) -> None:
    """An embedding that is not tied to the head makes a GPT a bit more than 5 % larger."""
    said = float(name.split("-")[1][:-1]) * 1e9
    assert num_parameters(ALPA_MODELS[name].workload) == pytest.approx(said, rel=0.08)
