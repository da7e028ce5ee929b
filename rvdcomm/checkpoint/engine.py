"""Engine: runs a reshard plan window by window, and resumes an interrupted run."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rvdcomm.checkpoint import journal
from rvdcomm.checkpoint.carried import carry
from rvdcomm.checkpoint.faults import as_checkpoint_error
from rvdcomm.checkpoint.files import PartFile, fault_of, sync_folder
from rvdcomm.checkpoint.forms import FORMS, Form, Piece, pieces_of
from rvdcomm.checkpoint.journal import Journal
from rvdcomm.checkpoint.plan import (
    DEFAULT_MAX_FILE_BYTES,
    DEFAULT_MEMORY_LIMIT,
    ReshardPlan,
    plan_reshard,
)
from rvdcomm.checkpoint.reader import Reader, tensor_of
from rvdcomm.checkpoint.rules import Rules
from rvdcomm.checkpoint.target import ALIGNMENT, Target, TargetBatch
from rvdcomm.errors import CheckpointError
from rvdcomm.layout import Box
from rvdcomm.units import bytes_text, secs_text

PROGRESS_DELAY_SECS = 2.0
"""Runs shorter than this show no progress bar."""

_THEN = "run the same again: files that are complete are kept"


@dataclass(frozen=True)
class ReshardReport:
    """The result of one reshard: its plan, what was kept and read, and the time.

    Attributes:
        plan: the plan that was carried out.
        num_files_kept: complete files of an earlier run, which were not written again.
        read_bytes: bytes of tensors that were read, by file of the source.
        secs: duration of the call.
    """

    plan: ReshardPlan
    num_files_kept: int
    read_bytes: Mapping[str, int]
    secs: float

    def __str__(self) -> str:
        read = sum(self.read_bytes.values())
        rate = bytes_text(read / self.secs) if self.secs else "0 B"
        kept = f", {self.num_files_kept} of them from before" if self.num_files_kept else ""
        return (
            f"{len(self.plan.targets)} tensors in {self.plan.num_files} files{kept}; "
            f"read {bytes_text(read)} in {secs_text(self.secs)} ({rate}/s)"
        )


def reshard(
    src_dir: str | Path,
    dst_dir: str | Path,
    rules: Rules | None = None,
    *,
    to: str = "sharded",
    dtype: str | None = None,
    memory_limit: int = DEFAULT_MEMORY_LIMIT,
    max_file_bytes: int = DEFAULT_MAX_FILE_BYTES,
    tensors_only: bool = False,
    index: str | None = None,
    follow_symlinks: bool = False,
    verify: bool = False,
    progress: bool = False,
) -> ReshardReport:
    """Write the checkpoint in ``src_dir`` to ``dst_dir``, in other shards and another form.

    Every element of every value part (partial sum) is read once, from one replica. The parts are
    summed in ascending order, in the tensor's own dtype. After an interruption, the same call
    continues the run and ends with the same bytes.

    Args:
        src_dir: a folder in a form that ``open_checkpoint`` knows; not modified.
        dst_dir: a folder that is new, empty, or left by an earlier run of the same call.
        rules: layouts and names; by default all tensors are on rank 0 and keep their names.
        to: ``"sharded"`` (one file per rank, with a manifest), ``"whole"`` (Hugging Face's form,
            with the config, the tokenizer and other small files of the source) or ``"dcp"`` (the
            form of ``torch.distributed.checkpoint``).
        dtype: convert tensors of ``CONVERTED`` dtypes to this one.
        memory_limit: the most bytes that buffers of tensors take at once.
        max_file_bytes: begin new files when a rank's file would exceed this many bytes of tensors.
            Files that are incomplete after a crash are written again, so smaller files lose less.
        tensors_only: leave out data that the result cannot hold, instead of raising an error. Such
            data are entries of a DCP checkpoint that are no tensors, tensors that the index of a
            Hugging Face-style checkpoint does not name, and ``__metadata__`` of safetensors if
            ``to="dcp"`` or if files have different texts.
        index: the index or file to read, if the folder holds several (``open_checkpoint``).
        follow_symlinks: also follow links of the source to files outside of its folder.
        verify: read all files in ``dst_dir`` again at the end and compare the checksums.
        progress: show a bar on stderr after two seconds, if stderr is a terminal.

    Returns:
        A report of the reshard.

    Raises:
        CheckpointError: the source is damaged, or the destination holds other data, is in use or
            cannot be written; the message says what is complete.
        LayoutError: the rules do not fit a tensor.
    """
    start = time.monotonic()
    plan = plan_reshard(
        src_dir,
        rules,
        to=to,
        dtype=dtype,
        memory_limit=memory_limit,
        max_file_bytes=max_file_bytes,
        tensors_only=tensors_only,
        index=index,
        follow_symlinks=follow_symlinks,
    )
    root = Path(dst_dir)
    if root.resolve() == Path(src_dir).resolve():
        raise CheckpointError(f"{src_dir} is source and destination; use another folder.")
    reader = Reader(plan.source.folder)
    request = _request(plan)
    # The request decides every byte of the result, so its checksum identifies this save.
    form = FORMS[to](save=_sha256(request)[:32], metadata=plan.metadata)
    with (
        as_checkpoint_error(f"resharding into {root}", root, _THEN),
        closing(Journal(root, request)) as log,
    ):
        num_files_kept = _run(plan, root, log, form, reader, verify, progress)
    return ReshardReport(plan, num_files_kept, reader.num_bytes_read, time.monotonic() - start)


def _request(plan: ReshardPlan) -> dict[str, Any]:
    """All values that decide the bytes of the result. A destination belongs to one request."""
    folder = plan.source.folder
    homes = [sorted(batch.files.items()) for batch in plan.batches for _ in batch.targets]
    # Each window becomes a chunk of a DCP checkpoint, so the window sizes decide its bytes.
    windows = [target.window_elements for target in plan.targets] if plan.to == "dcp" else []
    # Requests without these are as those of earlier versions, whose runs can be resumed.
    others: dict[str, Any] = {}
    if plan.carried:
        others["files carried along"] = _sha256([(n, *folder.version(n)) for n in plan.carried])
    if plan.steps:
        others["steps"] = plan.steps
    return {
        **others,
        "to": plan.to,
        "dtypes": sorted({target.dtype for target in plan.targets}),
        "ranks": sorted({rank for batch in plan.batches for rank in batch.files}),
        "layouts or names": _sha256(
            sorted((t.name, t.source.name, t.dtype, str(t.layout)) for t in plan.targets)
        ),
        "size of files or windows": _sha256([homes, windows]),
        "source": str(folder.root.resolve()),
        "files of the source": _sha256([(n, *folder.version(n)) for n in plan.source.files]),
        "metadata": dict(plan.metadata),
    }


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _run(
    plan: ReshardPlan,
    root: Path,
    log: Journal,
    form: Form,
    reader: Reader,
    verify: bool,
    progress: bool,
) -> int:
    """Write the files that are missing; return how many files of an earlier run were kept."""
    # If the earlier run has ended, only file sizes are compared; ``verify`` compares checksums.
    kept = [
        all(fault_of(root / name, done, read=not log.is_done) is None for name, done in b.items())
        for b in log.batches
    ]
    from tqdm import tqdm

    with tqdm(
        total=plan.read_bytes,
        unit="B",
        unit_scale=True,
        delay=PROGRESS_DELAY_SECS,
        disable=None if progress else True,  # None: no bar where stderr is no terminal.
    ) as bar:
        for i, batch in enumerate(plan.batches):
            if i < len(kept) and kept[i]:
                bar.update(sum(target.read_bytes for target in batch.targets))
                continue
            written = _move_batch(batch, root, form, reader, bar.update)
            if i < len(log.batches) and log.batches[i] != written:
                raise CheckpointError(
                    f"{root}: files of an earlier run were damaged, and the source does not give "
                    "the same bytes again; use a new folder."
                )
            if i >= len(log.batches):
                log.record(written)
    if verify:
        _verify(root, log)
    carry(plan.source.folder, plan.carried, root)
    # The journal is read back, so that a resumed run ends with the bytes of an uninterrupted one.
    form.finish(root, plan.batches, zip(plan.batches, log.recorded(), strict=True))
    log.finish()
    return sum(len(b.files) for b, is_kept in zip(plan.batches, kept, strict=False) if is_kept)


def _verify(root: Path, log: Journal) -> None:
    for batch in log.batches:
        for name, written in batch.items():
            fault = fault_of(root / name, written, read=True)
            if fault is not None:
                raise CheckpointError(
                    f"{root / name} {fault}: what was read again is not what was written; the "
                    "disk or the memory is faulty. Remove the file and run the same again."
                )


def _move_batch(
    batch: TargetBatch, root: Path, form: Form, reader: Reader, advance: Callable[[int], None]
) -> journal.WrittenFiles:
    """Write the files of a batch; they get their final names after all tensors are written."""
    files = {rank: PartFile(root, name) for rank, name in batch.files.items()}
    try:
        form.begin(batch, files)
        for target in batch.targets:
            _move(target, form, files, reader, advance)
        written = {batch.files[rank]: file.commit() for rank, file in files.items()}
    finally:
        for file in files.values():
            file.discard()
    sync_folder(root)
    return written


def _move(
    target: Target,
    form: Form,
    files: Mapping[int, PartFile],
    reader: Reader,
    advance: Callable[[int], None],
) -> None:
    """Read a tensor once, window by window, and write each cell of its layout."""
    buffers = _Buffers(target)
    src_dtype, dst_dtype = getattr(torch, target.source.dtype), getattr(torch, target.dtype)
    for window, pieces in pieces_of(target):
        found = buffers.tensor(0, src_dtype, window.shape)
        scratch = buffers.memory(1, window.num_elements)
        reader.gather(target.source, window, found, scratch)
        if dst_dtype != src_dtype:
            found = buffers.tensor(2, dst_dtype, window.shape).copy_(found)
        for cell, box in pieces:
            form.put((cell, box), _packed((cell, box), window, found, buffers), files)
        advance(window.num_elements * src_dtype.itemsize * target.source.num_parts)
    reader.check(target.source)
    form.end(target, files)


def _packed(piece: Piece, window: Box, found: Tensor, buffers: _Buffers) -> Tensor:
    """A piece of a window as a contiguous tensor whose storage has no other elements.

    Value part 0 holds the values and the other parts are zeros, so the parts sum to the tensor.
    """
    cell, box = piece
    if cell.part == 0 and box == window:
        return found
    out = buffers.tensor(3, found.dtype, box.shape)
    if cell.part:
        return out.zero_()
    return out.copy_(found[box.slices_within(window)])


class _Buffers:
    """The buffers of one tensor's windows, in one allocation of up to ``Target.peak_bytes``."""

    def __init__(self, target: Target) -> None:
        self.items = target.buffer_items
        sizes = [-(-target.window_elements * item // ALIGNMENT) * ALIGNMENT for item in self.items]
        self.starts = [sum(sizes[:i]) for i in range(len(sizes))]
        self.block = np.empty(sum(sizes), np.uint8).data

    def memory(self, i: int, num_elements: int) -> memoryview:
        """The start of buffer ``i``: as many bytes as ``num_elements`` take."""
        return self.block[self.starts[i] :][: num_elements * self.items[i]]

    def tensor(self, i: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """The start of buffer ``i`` as a tensor ``[*shape]``."""
        size = int(np.prod(shape, dtype=np.int64))
        return tensor_of(self.memory(i, size), dtype, shape)
