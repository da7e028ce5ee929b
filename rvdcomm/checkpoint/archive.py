"""Archives: finds the elements of a tensor in a file that ``torch.save`` wrote.

An archive is a zip file whose entries are not compressed: ``data.pkl`` says shape and strides,
``data/0`` is the memory of the tensor. So a range of elements is a range of bytes of the file.
"""

from __future__ import annotations

import hashlib
import io
import struct
import zipfile
from dataclasses import dataclass
from math import prod
from typing import Any

from rvdcomm.checkpoint.folder import Folder
from rvdcomm.checkpoint.inert import Global, Persistent, PickledCall, inert
from rvdcomm.checkpoint.stored import Extent
from rvdcomm.errors import CheckpointError
from rvdcomm.layout import ITEM_BYTES
from rvdcomm.text import quoted

MAX_READ_BYTES = 4 << 20
"""Most bytes read of an archive's directory and description; a tensor's take less than 2 KiB."""

_PIECE_BYTES = 1 << 20

_STORAGE_DTYPES = {
    "FloatStorage": "float32", "DoubleStorage": "float64", "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16", "BoolStorage": "bool", "ByteStorage": "uint8",
    "CharStorage": "int8", "ShortStorage": "int16", "IntStorage": "int32", "LongStorage": "int64",
    "ComplexFloatStorage": "complex64", "ComplexDoubleStorage": "complex128",
}  # fmt: skip

# Errors that zipfile raises for files that are no zip files; our own errors are ValueErrors.
_DAMAGE = (
    *(zipfile.BadZipFile, EOFError, OSError, RuntimeError, ValueError, struct.error),
    NotImplementedError,
)


@dataclass(frozen=True, slots=True)
class Elements:
    """Where the elements of a tensor lie in a file: from byte ``start`` on, in dim order ``order``.

    ``order`` lists the dims, outermost first. It is ``(0, 1)`` for a matrix in row-major order and
    ``(1, 0)`` for a transposed one. ``crc`` is the checksum of the memory in the archive.
    """

    start: int
    order: tuple[int, ...]
    crc: int


def locate(folder: Folder, extent: Extent, dtype: str) -> Elements:
    """Where the elements of the tensor in an archive lie.

    Args:
        folder: the folder of the archive's file.
        extent: the bytes of the file that are the archive, and the shape of its tensor.
        dtype: the tensor's dtype.

    Raises:
        CheckpointError: the archive holds something else, or is damaged.
    """
    start, end, shape = extent.start, extent.start + extent.num_bytes, extent.shape
    with folder.open(extent.file) as file:
        view = _Region(file, start, extent.num_bytes)
        try:
            with zipfile.ZipFile(view) as archive:
                return _located(archive, view, start, dtype, shape)
        except _DAMAGE as error:
            raise CheckpointError(
                f"{folder.root / extent.file}, bytes {start} to {end}: no tensor {dtype} "
                f"{list(shape)} as torch.save writes it: {str(error).rstrip('.')}; copy the file "
                "again."
            ) from None


def digest(folder: Folder, extent: Extent, dtype: str) -> object:
    """A value that is equal for two arrays if their elements are equal, and else differs.

    An archive has a checksum of its data in its directory; other data are read.
    """
    if extent.is_archive:
        elements = locate(folder, extent, dtype)
        return elements.order, elements.crc
    found = hashlib.sha256()
    with folder.open(extent.file) as file:
        file.seek(extent.start)
        left = extent.num_bytes
        while left and (data := file.read(min(left, _PIECE_BYTES))):
            found.update(data)
            left -= len(data)
    return found.hexdigest()


def _located(
    archive: zipfile.ZipFile, view: _Region, start: int, dtype: str, shape: tuple[int, ...]
) -> Elements:
    entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
    missing = {"data.pkl", "data/0"} - set(entries)
    if missing:
        raise CheckpointError(f"it has no entry {', '.join(sorted(missing))}")
    if any(info.compress_type != zipfile.ZIP_STORED for info in entries.values()):
        raise CheckpointError("its entries are compressed")
    if "byteorder" in entries and archive.read(entries["byteorder"]) != b"little":
        raise CheckpointError("its byte order is not little-endian")
    found_dtype, found_shape, strides, offset = _described(archive.read(entries["data.pkl"]))
    if (found_dtype, found_shape) != (dtype, shape):
        raise CheckpointError(f"it holds {found_dtype} {list(found_shape)}")
    data = entries["data/0"]
    order = _order(shape, strides)
    first = offset * ITEM_BYTES[dtype]
    if offset < 0 or first + prod(shape) * ITEM_BYTES[dtype] > data.file_size:
        raise CheckpointError(f"its data of {data.file_size} bytes is too short")
    # The length of an entry's header is in the header; torch pads it so that the data is aligned.
    view.seek(data.header_offset)
    header = view.read(30)
    if header[:4] != b"PK\3\4":
        raise CheckpointError("its data has no header")
    lengths = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
    data_start = data.header_offset + 30 + sum(lengths)
    if data_start + data.file_size > view.num_bytes:
        raise CheckpointError("its data ends outside of it")
    return Elements(start + data_start + first, order, data.CRC)


def _described(pickle: bytes) -> tuple[str, tuple[int, ...], tuple[int, ...], int]:
    """Dtype, shape, strides and offset (both in elements) from the pickle of a tensor."""
    said = inert(pickle)
    if isinstance(said, PickledCall) and said.function == Global("torch._utils._rebuild_parameter"):
        said = said.args[0] if isinstance(said.args, tuple) and said.args else None
    known = Global("torch._utils._rebuild_tensor_v2"), Global("torch._utils._rebuild_tensor_v3")
    if not isinstance(said, PickledCall) or said.function not in known or not _is_plain(said.args):
        raise CheckpointError("it describes no plain tensor")
    storage, offset, shape, strides = said.args[:4]
    name = storage.what[1].name.removeprefix("torch.")
    dtype = _STORAGE_DTYPES.get(name)
    if said.function == known[1]:  # Version 3 has a storage of bytes; argument 6 is the dtype.
        last = said.args[6] if len(said.args) > 6 else None
        name = last.name if isinstance(last, Global) else ""
        dtype = name.removeprefix("torch.")
    if dtype not in ITEM_BYTES:
        raise CheckpointError(f"its storage is {quoted(name)}")
    return dtype, shape, strides, offset


def _is_plain(args: Any) -> bool:
    """Whether these are the arguments of a tensor on one storage, which is entry ``data/0``."""
    if not isinstance(args, tuple) or len(args) < 6 or not isinstance(args[0], Persistent):
        return False
    storage = args[0].what
    return (
        isinstance(storage, tuple)
        and len(storage) == 5
        and storage[0] == "storage"
        and isinstance(storage[1], Global)
        and storage[2] == "0"
        and type(args[1]) is int
        and all(isinstance(a, tuple) and all(type(n) is int for n in a) for a in args[2:4])
        and len(args[2]) == len(args[3])
    )


def _order(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Dims from the largest stride to the smallest, if the tensor is dense in that order."""
    # A dim of one element may have any stride, so its place in the order does not matter.
    order = sorted(range(len(shape)), key=lambda d: (-strides[d] if shape[d] != 1 else 0, d))
    step, is_empty = 1, 0 in shape
    for d in reversed(order):
        if shape[d] != 1 and strides[d] != step and not is_empty:
            raise CheckpointError(
                f"it has strides {strides}, which leave gaps; save a contiguous tensor"
            )
        step *= shape[d]
    return tuple(order)


class _Region(io.RawIOBase):
    """A region of a file, itself readable as a file, up to ``MAX_READ_BYTES`` bytes in total."""

    def __init__(self, file: io.FileIO, start: int, num_bytes: int) -> None:
        self.file, self.start, self.num_bytes = file, start, num_bytes
        self.position = self.num_read = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.num_bytes}[whence]
        if base + offset < 0:
            raise OSError("a seek to before the region")
        self.position = base + offset
        return self.position

    def read(self, size: int = -1) -> bytes:
        left = max(0, self.num_bytes - self.position)
        wanted = left if size is None or size < 0 else min(size, left)
        self.num_read += wanted
        if self.num_read > MAX_READ_BYTES:
            raise CheckpointError(f"its directory takes more than {MAX_READ_BYTES} bytes")
        self.file.seek(self.start + self.position)
        found = self.file.read(wanted)
        self.position += len(found)
        return found
