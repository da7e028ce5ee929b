"""Safetensors files: reads their headers in bounded time and memory, and makes headers.

The format is 8 bytes of header length, a JSON header, then the tensors' bytes without gaps. The
safetensors library reads and writes whole tensors; resharding needs ranges of bytes and files
larger than memory (docs/adr/0013-checkpoints-are-read-and-written-by-ranges.md). Tests compare
this module with the library.

Source: https://huggingface.co/docs/safetensors, section Format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from rvdcomm.checkpoint.faults import naming
from rvdcomm.checkpoint.folder import Folder
from rvdcomm.checkpoint.stored import check_shape
from rvdcomm.errors import CheckpointError
from rvdcomm.layout import ITEM_BYTES
from rvdcomm.text import quoted

DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16",
    "U32": "uint32", "I32": "int32", "U64": "uint64", "I64": "int64",
    "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64", "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip
"""Names of dtypes in a header, each with the name that rvdcomm uses."""

_CODES = {ours: code for code, ours in DTYPES.items()}

MAX_HEADER_BYTES = 32 << 20
"""Enough for about 200,000 tensors in one file."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of a file: its elements are in ``num_bytes`` bytes from ``start`` of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


@dataclass(frozen=True)
class Header:
    """The header of a file: its tensors by name, and the texts that its writer noted."""

    entries: dict[str, TensorEntry]
    metadata: dict[str, str]


def read_header(folder: Folder, name: str, start: int = 0) -> Header:
    """The header of a file that begins at byte ``start``, checked against the file's size.

    Raises:
        CheckpointError: the file is no safetensors file, is cut off or damaged, or has a dtype
            that is not in ``DTYPES``.
        OSError: the file cannot be read.
    """
    path = folder.root / name
    with folder.open(name) as file, naming(path):
        size, _ = folder.version(name)
        size -= start
        file.seek(start)
        length = int.from_bytes(file.read(8), "little")
        try:
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise CheckpointError(
                    f"its header would take {length} bytes, the file has {size} bytes and up to "
                    f"{MAX_HEADER_BYTES} of header are read"
                )
            return _parsed(file.read(length), start + 8 + length, start + size)
        except _UnknownDtypeError as error:
            raise CheckpointError(f"{path}: {error}.") from None
        except CheckpointError as error:
            raise CheckpointError(
                f"{path} is no whole safetensors file: {error}; write or copy it again."
            ) from None


class _UnknownDtypeError(CheckpointError):
    """The file may be whole, but it holds a tensor that cannot be read."""


def _parsed(text: bytes, data_start: int, size: int) -> Header:
    try:
        values = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
        if b"\\u" in text:
            # An escape may stand for a lone surrogate, which is in no UTF-8 text.
            json.dumps(values, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise CheckpointError("its header is nested too deeply") from None
    except ValueError as error:
        raise CheckpointError(f"its header is no JSON: {quoted(str(error))}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"its header is {quoted(values)} where an object is expected")
    metadata = values.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError("its '__metadata__' must map texts to texts")
    entries = {name: _entry(name, value, data_start) for name, value in values.items()}
    _check_ranges(entries, data_start, size)
    return Header(entries, metadata)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise CheckpointError("its header names something twice")
    return values


def _entry(name: str, value: Any, data_start: int) -> TensorEntry:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"tensor {quoted(name)} needs 'dtype', 'shape' and 'data_offsets'")
    code, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(code, str) or code not in DTYPES:
        raise _UnknownDtypeError(
            f"tensor {quoted(name)} has the unknown dtype {quoted(code)}; known are "
            f"{', '.join(DTYPES)}"
        )
    if not (_are_integers(shape) and _are_integers(offsets) and len(offsets) == 2):
        raise CheckpointError(f"tensor {quoted(name)} has a shape or offsets that are no integers")
    check_shape(name, tuple(shape))
    begin, end = offsets
    num_bytes = prod(shape) * ITEM_BYTES[DTYPES[code]]
    if end - begin != num_bytes:
        raise CheckpointError(
            f"tensor {quoted(name)} {code} {shape} takes {num_bytes} bytes, its data_offsets "
            f"{quoted(offsets)} hold {quoted(end - begin)}"
        )
    return TensorEntry(DTYPES[code], tuple(shape), data_start + begin, num_bytes)


def _are_integers(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int for v in values)


def _check_ranges(entries: Mapping[str, TensorEntry], data_start: int, size: int) -> None:
    """The format allows neither gaps nor overlaps, so the tensors end where the file does."""
    position = data_start
    for name, entry in sorted(entries.items(), key=lambda e: (e[1].start, e[1].num_bytes)):
        if entry.start != position:
            raise CheckpointError(
                f"tensor {quoted(name)} starts at byte {quoted(entry.start)} of the file where "
                f"byte {position} is next"
            )
        position += entry.num_bytes
    if position != size:
        raise CheckpointError(f"its tensors end at byte {position}, the file at byte {size}")


def header_bytes(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> bytes:
    """All bytes of a file before the bytes of these tensors (dtype and shape), in this order.

    Raises:
        CheckpointError: the format has no such dtype or name, or the header gets too long.
    """
    values: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name, (dtype, shape) in tensors.items():
        if dtype not in _CODES or name == "__metadata__" or not _is_utf8(name):
            raise CheckpointError(
                f"tensor {name!r} {dtype}: safetensors has no such tensor; give it another name, "
                f"or one of {', '.join(_CODES)}."
            )
        end = position + prod(shape) * ITEM_BYTES[dtype]
        values[name] = {
            "dtype": _CODES[dtype],
            "shape": list(shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(values, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    # Tensors start at a multiple of 8 bytes, so that memory maps of them are aligned.
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"a header of {len(tensors)} tensors takes {len(text)} bytes, and up to "
            f"{MAX_HEADER_BYTES} are read; use smaller files (max_file_bytes)."
        )
    return len(text).to_bytes(8, "little") + text


def _is_utf8(name: str) -> bool:
    """Whether UTF-8 has the text: Python's texts may have lone surrogates, which it has not."""
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
