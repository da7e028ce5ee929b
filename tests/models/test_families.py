"""Each family of transformers is captured as it is, and trains under each plan as on one device."""

import pytest

from tests.models.cells import KNOBS, compiled, error
from tests.models.families import FAMILIES


@pytest.mark.parametrize("num_devices", [2, 4])
@pytest.mark.parametrize("plan", KNOBS)
@pytest.mark.parametrize("family", FAMILIES)
def test_family_trains_under_a_plan_as_on_one_device(family, plan, num_devices, tmp_path):
    program = compiled(family, plan, num_devices)
    assert error(family, program, tmp_path) <= FAMILIES[family].tolerance
