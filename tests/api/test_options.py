"""The options of calls as one value: the same calls as with their options by name."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

import rvdcomm as rv
from rvdcomm.api.options import AS_USUAL, TAKEN, filled

VALUES = {
    "group": "a group",
    "topology": rv.Topology.single_host(2, 5e-6, 20e9),
    "executor": "dist",
    "memory_limit": 1 << 20,
    "dtype": "float32",
    "shape": (6, 4),
    "requires_grad": False,
    "replica_grads": "copies",
    "names": str.upper,
    "dst_dtype": "bfloat16",
    "scale": 0.5,
}


def test_every_option_is_a_keyword_and_of_some_function() -> None:
    assert [*rv.CallOptions._fields] == [*VALUES]
    assert frozenset().union(*TAKEN.values()) == {*VALUES}


@pytest.mark.parametrize("function", TAKEN)
def test_options_by_name_equal_those_of_a_value(function: str) -> None:
    given = {name: VALUES[name] for name in TAKEN[function]}
    made = rv.CallOptions(**given)
    assert filled(function, AS_USUAL, given) == filled(function, made, {}) == made


def test_an_option_given_by_name_counts() -> None:
    made = rv.CallOptions(executor="peer", memory_limit=5)
    assert filled("redistribute", made, {"executor": "dist"}) == made._replace(executor="dist")


@pytest.mark.parametrize(
    ("function", "name"),
    [(function, n) for function in TAKEN for n in VALUES if n not in TAKEN[function]],
)
@pytest.mark.parametrize("is_by_name", [False, True])
def test_an_option_of_the_other_function_is_refused(
    function: str, name: str, is_by_name: bool
) -> None:
    given = {name: VALUES[name]}
    asked = (AS_USUAL, given) if is_by_name else (rv.CallOptions(**given), {})
    with pytest.raises(TypeError, match=rf"^{function} takes no {name}; its keywords are .*dtype"):
        filled(function, *asked)


@pytest.mark.parametrize("options", [{"executor": "dist"}, None, ("dist",)])
def test_options_that_are_no_such_value_are_refused(options: Any) -> None:
    with pytest.raises(TypeError, match=r"it is an rvdcomm\.CallOptions"):
        rv.redistribute(None, "R(1)V(1)D(1)", "R(1)V(1)D(1)", options=options)


def test_a_misspelt_option_is_refused_by_name() -> None:
    with pytest.raises(
        TypeError, match=r"takes no memory_limt; its keywords are .* Is it memory_limit\?"
    ):
        rv.redistribute_many({}, {}, {}, memory_limt=5)  # type: ignore[call-arg]


@pytest.mark.parametrize("function", TAKEN)
def test_options_that_were_sent_to_another_process_are_as_good(function: str) -> None:
    made = pickle.loads(pickle.dumps(rv.CallOptions(executor="dist")))
    assert filled(function, made, {}) == rv.CallOptions(executor="dist")
