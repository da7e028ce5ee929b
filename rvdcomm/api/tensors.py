"""Tensors: which ones a call can read and write, and what to do about one that it cannot.

The engine reads and writes memory by its address. So a tensor has to have all its elements in
memory that its own storage holds, and every function that takes tensors of a caller asks here
first.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.parameter import Parameter, is_lazy

from rvdcomm.api.overlap import Region
from rvdcomm.run.request import SHARES_MEMORY

_PLAIN = frozenset({Tensor, Parameter})
"""Classes without behaviour of their own."""


def misuse_of(tensor: Any, out: Any) -> str | None:
    """What is wrong with the tensors of a call, whatever was passed; None if nothing is."""
    if torch._C._len_torch_dispatch_stack() and (fault := fault_of_mode()):
        return fault
    fault = None if tensor is None else fault_of(tensor)
    if fault is not None:
        return f"the tensor {fault}"
    if out is None:
        return None
    fault = fault_of_out(out)
    if fault is not None:
        return f"out {fault}"
    if tensor is None:
        return None
    if tensor.device != out.device:
        return f"out is on {out.device} and the tensor on {tensor.device}; use one device."
    shares = _shares(tensor, out) and place_within(tensor, out) is None
    return SHARES_MEMORY if shares else None


def place_within(tensor: Tensor | None, out: Tensor | None) -> tuple[int, ...] | None:
    """The index in ``out`` of the first element of ``tensor``; None if it is no part of ``out``.

    Neither tensor may have a fault (``fault_of``, ``fault_of_out``).
    """
    if tensor is None or out is None or not _shares(tensor, out):
        return None
    if tensor.dtype != out.dtype or tensor.dim() != out.dim() or not out.is_contiguous():
        return None
    if resolved(tensor) is not tensor:
        return None
    # Two storages may be made of one memory, so offsets in them do not tell where a tensor lies.
    left, odd = divmod(tensor.data_ptr() - out.data_ptr(), out.itemsize)
    if odd:
        return None
    place = []
    for d, (size, num) in enumerate(zip(out.shape, tensor.shape, strict=True)):
        stride = prod(out.shape[d + 1 :])
        index, left = divmod(left, stride)
        if index < 0 or index + num > size or (num > 1 and tensor.stride(d) != stride):
            return None
        place.append(index)
    return tuple(place)


def _shares(tensor: Tensor, out: Tensor) -> bool:
    """Whether two tensors have memory in common."""
    (start, end), (out_start, out_end) = _span(tensor), _span(out)
    is_near = start < out_end and out_start < end
    return is_near and Region.of(tensor).meets(Region.of(out))


def fault_of(tensor: Any) -> str | None:
    """Why a call cannot read ``tensor``, and what to pass instead; None if it can.

    The text continues a sentence whose subject is the tensor.
    """
    if type(tensor) not in _PLAIN and (fault := _fault_of_class(tensor)):
        return fault
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:  # type: ignore[no-untyped-call]
        return "has a forward-mode tangent, which no call carries; pass its primal alone."
    try:
        # A tensor without memory of its own has no storage, or a storage without an address.
        storage = tensor.untyped_storage()
        start, num_bytes = storage.data_ptr(), storage.nbytes()
        if tensor.is_nested or tensor.is_quantized or not (start or _is_empty(tensor)):
            return _fault_of_kind(tensor)
        used = tensor.nbytes if tensor.is_contiguous() else _used_bytes(tensor)
        if used and tensor.data_ptr() - start + used > num_bytes:
            return _fault_of_kind(tensor)
    except (RuntimeError, ValueError):
        return _fault_of_kind(tensor)
    return None


def fault_of_out(out: Any) -> str | None:
    """Why a call cannot write to ``out``, as a text like that of ``fault_of``; None if it can."""
    fault = fault_of(out)
    if fault is not None:
        return fault
    if out.is_contiguous() and not (out.is_inference() or out.is_neg() or out.is_conj()):
        return None
    return next((text for applies, text in _UNWRITABLE if applies(out)), None)


def fault_of_mode() -> str | None:
    """Why no call can run here, whatever the tensors are; None if calls can."""
    if type(torch.empty(0, device="cpu")) is Tensor:
        return None
    return (
        "a mode is active in which new tensors have no memory (as FakeTensorMode); call it outside."
    )


def written(out: Tensor) -> Tensor:
    """Tell autograd that ``out`` was written: it notices only writes of its own operations."""
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)
    return out


def resolved(tensor: Tensor) -> Tensor:
    """Write out a tensor that is conjugated or negated lazily: its memory has other values."""
    if tensor.is_conj() or tensor.is_neg():
        return tensor.resolve_conj().resolve_neg()
    return tensor


# --- tensors that cannot be read ----------------------------------------------------------------

_UNREADABLE: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (
        is_lazy,
        "is uninitialized and has no shape yet; run its lazy module once before.",
    ),
    (
        torch._C._functorch.is_functorch_wrapped_tensor,
        "is one that torch.func transforms (vmap, grad, jvp), and these transform no "
        "communication; call it outside of them.",
    ),
    (lambda x: x.is_nested, "is nested; pass the tensors of its unbind() one by one."),
    (
        lambda x: x.layout is not torch.strided,
        "has no strides (it is sparse, or in a format of MKL-DNN); pass tensor.to_dense().",
    ),
    (
        lambda x: x.is_meta,
        "is on the device meta and has no values; make it real before, as to_empty() does.",
    ),
    (lambda x: x.is_quantized, "is quantized; pass tensor.int_repr(), or tensor.dequantize()."),
    (
        torch._is_functional_tensor,
        "is one that torch.func.functionalize made; call it outside of that.",
    ),
    (lambda x: x._is_zerotensor(), "is zeros without memory; pass tensor.clone()."),
)
"""Kinds of tensors without readable memory, and what to do; the first that applies is reported."""

_CLASSES = {
    "DTensor": "use rvdcomm.interop.dtensor.redistribute, or pass tensor.to_local().",
    "FakeTensor": "it has no values; pass a real tensor (under torch.compile, call it inside).",
    "AsyncCollectiveTensor": "pass tensor.wait().",
    "NestedTensor": "pass the tensors of its unbind() one by one.",
    "MaskedTensor": "pass tensor.get_data().",
}
"""What to do about subclasses that keep their values elsewhere; by name, as few are imported."""


def _fault_of_class(given: Any) -> str | None:
    """What is wrong with an argument that is no plain tensor; None if nothing is."""
    name = type(given).__name__
    if not isinstance(given, Tensor):
        return f"is of type {name}, which is no torch.Tensor; pass torch.as_tensor(...) of it."
    # Subclasses without this function have their values in memory of their own, like Parameter.
    if type(given).__torch_dispatch__ is Tensor.__torch_dispatch__:
        return None
    known = next((c.__name__ for c in type(given).__mro__ if c.__name__ in _CLASSES), None)
    advice = _CLASSES[known] if known else "its values are in other tensors; pass those."
    return f"is of type {known or name}: {advice}"


def _fault_of_kind(tensor: Tensor) -> str:
    """What is wrong with a tensor whose memory cannot be read."""
    for applies, text in _UNREADABLE:
        if applies(tensor):
            return text
    try:
        wanted = _used_bytes(tensor) + tensor.storage_offset() * tensor.itemsize
        return (
            f"needs {wanted} bytes of its storage, which has {tensor.untyped_storage().nbytes()}: "
            "it was freed or resized (as FSDP does between uses); pass one that has its values."
        )
    except (RuntimeError, ValueError) as error:
        return f"has no memory that can be read ({error})."


def _is_empty(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.numel() == 0 and tensor.device.type != "meta"


def _used_bytes(tensor: Tensor) -> int:
    """Bytes from the first to the last element of a strided tensor, both included."""
    if not tensor.numel():
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.itemsize


# --- tensors that cannot be written -------------------------------------------------------------


def _overlaps_itself(tensor: Tensor) -> bool:
    """Whether elements may share memory: a dim's step lies within what shorter steps cover."""
    covered = 0
    steps = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted((stride, size) for stride, size in steps if size > 1):
        if stride <= covered:
            return True
        covered += stride * (size - 1)
    return False


_UNWRITABLE: tuple[tuple[Callable[[Tensor], bool], str], ...] = (
    (
        lambda x: not x.is_contiguous() and x.numel() > 0 and _overlaps_itself(x),
        "has elements that share memory (it is expanded, or its strides overlap); give one whose "
        "elements have places of their own.",
    ),
    (
        lambda x: x.is_conj() or x.is_neg(),
        "is conjugated or negated lazily; give the tensor that it is a view of.",
    ),
    (
        lambda x: x.is_inference() and not torch.is_inference_mode_enabled(),
        "was made under torch.inference_mode(), outside of which it may not be written.",
    ),
)
"""Kinds of tensors that may be read but not written, and what to do."""


def _span(tensor: Tensor) -> tuple[int, int]:
    """The addresses of the first byte of a tensor, and of the one after its last."""
    start = tensor.data_ptr()
    used = tensor.nbytes if tensor.is_contiguous() else _used_bytes(tensor)
    return start, start + used
