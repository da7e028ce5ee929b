"""Each model of transformers is captured unchanged and trains under each plan as on one device."""

from itertools import product

import pytest

from tests.models.cells import KNOBS, MODELS, compiled, error

pytestmark = pytest.mark.filterwarnings("ignore::superscaler_core.OpaqueWarning")

PLANS = [*product(KNOBS, (2, 4))]
CASES = [(family, how) for i, family in enumerate(MODELS) for how in PLANS[i % 3 :: 3]]
"""Every family under four plans; every plan is on 2 and on 4 devices, each with many families."""


@pytest.mark.many(48)
@pytest.mark.parametrize("family, how", CASES)
def test_family_trains_under_a_plan_as_on_one_device(family, how, tmp_path):
    program = compiled(family, *how)
    assert error(family, program, tmp_path) <= MODELS[family].tolerance
