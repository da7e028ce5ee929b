"""Records: a loader is recorded without data, and then filled from the boxes that it reads."""

from __future__ import annotations

import pytest
import torch

from rvdcomm import Box, LayoutError
from rvdcomm.interop.vllm.record import Record, recorded
from rvdcomm.interop.vllm.recorded import CheckpointTensor, NotRecordedError
from rvdcomm.interop.vllm.regions import joined
from rvdcomm.interop.vllm.staging import Staging
from tests.interop.vllm.loaders import SHAPES, Engine, checkpoint, loaded, metas

CPU = torch.device("cpu")


def record_of(engine: Engine) -> Record:
    return recorded(engine.without_data().load_weights, metas(), CPU)


def staging_of(record: Record) -> Staging:
    boxes = {name: joined(record.boxes(name)) for name in record.copies}
    boxes |= {name: (Box.of_shape(SHAPES[name]),) for name in record.whole}
    return Staging(metas(), boxes, dict.fromkeys(boxes, torch.float32), CPU)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loader_fills_from_its_share_what_it_fills_from_all(
    size: int, dtype: torch.dtype
) -> None:
    weights = checkpoint(0)
    for rank in range(size if size < 4 else 3):
        engine = Engine(rank, size, dtype)
        record = record_of(engine)
        staging = staging_of(record)
        for name, boxes in staging.boxes.items():
            for box, held in zip(boxes, staging.held[name], strict=True):
                held.copy_(weights[name][box.slices_within(Box.of_shape(SHAPES[name]))])
        engine.load_weights(staging.tensors(record.whole))
        wanted = loaded(rank, size, weights, dtype)
        for name, parameter in engine.parameters.items():
            assert torch.equal(parameter, wanted[name]), name


def test_what_needs_data_is_loaded_whole_and_says_why() -> None:
    record = record_of(Engine(0, 2, torch.float32))
    assert record.whole == {
        "table": "its loader calls aten.add.Tensor",
        "scale": "its loader calls aten._local_scalar_dense.default",
    }
    assert not {"unused", "head"} & record.copies.keys()
    assert record.loaded == Engine(0, 2, torch.float32).parameters.keys()


def test_a_share_is_what_the_worker_needs() -> None:
    record = record_of(Engine(1, 2, torch.float32))
    assert joined(record.boxes("embed")) == (Box((8, 0), (13, 8)),)
    assert joined(record.boxes("o")) == (Box((0, 4), (8, 8)),)
    assert joined(record.boxes("fused_up")) == (
        Box((0, 0, 3), (3, 8, 6)),
        Box((0, 0, 9), (3, 8, 12)),
    )


def test_dtypes_on_the_way_are_recorded() -> None:
    record = record_of(Engine(0, 1, torch.bfloat16))
    assert record.wanted("gate") == torch.bfloat16
    assert record.wanted("norm") == torch.bfloat16
    assert record.wanted("unused") is None


def test_a_conversion_on_the_way_is_made_in_turn() -> None:
    param = torch.zeros(4, device="meta")

    def load(weights: object) -> None:
        for _, tensor in weights:  # type: ignore[attr-defined]
            param.copy_(tensor.to(torch.float16).to(torch.float32))

    of_four = {"w": metas()["norm"]._replace(shape=(4,))}
    record = recorded(load, of_four, CPU)
    assert record.wanted("w") is None
    values = torch.tensor([0.1, 1e-9, 70000.0, 3.0])
    staging = Staging(of_four, {"w": (Box((0,), (4,)),)}, {"w": torch.float32}, CPU)
    staging.held["w"][0].copy_(values)
    param = torch.zeros(4)
    load(staging.tensors({}))
    assert torch.equal(param, values.half().float())


def test_an_error_of_a_loader_names_the_tensor() -> None:
    def load(weights: object) -> None:
        for name, tensor in weights:  # type: ignore[attr-defined]
            if name == "q":
                tensor.narrow(0, 5, 100)

    with pytest.raises(LayoutError, match=r"loader fails at \['q'\] of shape \(8, 8\) and "):
        recorded(load, metas(), CPU)


def test_a_view_that_was_not_recorded_is_refused_by_name() -> None:
    boxes = {"q": (Box((0, 0), (2, 8)),)}
    staging = Staging(metas(), boxes, {"q": torch.float32}, CPU)
    tensors = dict(staging.tensors({}))
    with pytest.raises(NotRecordedError, match=r"q: its loader reads \[0:8,0:8\] now"):
        torch.empty(8, 8).copy_(tensors["q"])


def test_a_tensor_without_data_says_what_it_is() -> None:
    tensor = CheckpointTensor.whole("w", (4, 2), torch.bfloat16, CPU, Record())
    assert repr(tensor) == "CheckpointTensor('w', shape=(4, 2), dtype=torch.bfloat16)"
    assert tensor.t().shape == (2, 4)
    with pytest.raises(NotRecordedError, match="w: its loader calls aten"):
        tensor.sum()
