"""Flow: what the steps of a stage pass to each other on one device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from superscaler_core.materialize.flow import DeviceFlow
from superscaler_core.program import GIVEN, Role, Value
from tests.superscaler_core.program.few import FEW, compiled


def flows(mechanism: str) -> Iterator[DeviceFlow]:
    for stage in compiled(mechanism).materialized.stages:
        for device in stage.steps:
            yield stage.flow(device)


@pytest.mark.parametrize("mechanism", FEW)
def test_a_segment_reads_what_exists_or_was_made_before_it(mechanism: str) -> None:
    for flow in flows(mechanism):
        made: set[Value] = set()
        for segment in flow.segments:
            mine = flow.of[segment.name]
            read = [held.value for held in mine.args if held.value.role is Role.RESULT]
            assert made.issuperset(read)
            assert all(
                held.value.role in GIVEN | {Role.COPY, Role.ARRIVED, Role.RESULT}
                for held in mine.args
            )
            made |= {held.value for held in mine.results}


@pytest.mark.parametrize("mechanism", FEW)
def test_every_reader_of_a_value_with_gradient_adds_to_it_once(mechanism: str) -> None:
    for flow in flows(mechanism):
        readers = {
            (held.value, segment.name)
            for segment in flow.segments if segment.has_backward
            for held in flow.of[segment.name].inputs
        }  # fmt: skip
        readers |= {
            (held.value, edge.name)
            for edge, sent in flow.sent.items() if edge.backward
            for held in sent
        }  # fmt: skip
        named = [grad.name for grads in flow.grads.values() for grad in grads]
        assert sorted(named) == sorted(f"{value} by {reader}" for value, reader in readers)


@pytest.mark.parametrize("mechanism", FEW)
def test_values_are_one_part_of_one_tensor_on_a_device(mechanism: str) -> None:
    for flow in flows(mechanism):
        parts: dict[object, object] = {}
        for held in flow.all:
            part = held.tensor, held.box
            assert parts.setdefault(held.value, part) == part


def test_a_rerun_span_reads_what_no_step_in_it_computes() -> None:
    for flow in flows("spans"):
        for region, steps in flow.regions.items():
            inside = {held.value for s in flow.segments if s in steps
                      for held in flow.of[s.name].results}  # fmt: skip
            assert inside.isdisjoint(held.value for held in flow.entering(region))
