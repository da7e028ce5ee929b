"""Plan: the files of a reshard, the bytes that it reads and writes, and its memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rvdcomm.checkpoint.carried import carried
from rvdcomm.checkpoint.catalog import open_checkpoint
from rvdcomm.checkpoint.forms import FORMS
from rvdcomm.checkpoint.rules import Rules
from rvdcomm.checkpoint.stored import Catalog, StoredTensor
from rvdcomm.checkpoint.target import CONVERTED, Target, TargetBatch
from rvdcomm.errors import CheckpointError, LayoutError
from rvdcomm.layout import ITEM_BYTES, NOT_SUMMED, check_summable, dtype_name
from rvdcomm.text import quoted
from rvdcomm.units import bytes_text

DEFAULT_MEMORY_LIMIT = 256 << 20
MIN_MEMORY_LIMIT = 64 << 10
DEFAULT_MAX_FILE_BYTES = 5_000_000_000
"""Hugging Face's default, too; a file of this size can be copied and checked in minutes."""

_COLUMNS = 100


@dataclass(frozen=True)
class ReshardPlan:
    """The plan of a reshard: its source, and the files and tensors to write; ``print`` shows it."""

    source: Catalog
    to: str
    batches: tuple[TargetBatch, ...]
    metadata: Mapping[str, str]
    carried: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()

    @property
    def targets(self) -> list[Target]:
        """All tensors of the result."""
        return [target for batch in self.batches for target in batch.targets]

    @property
    def num_files(self) -> int:
        """Number of files with tensors that are written."""
        return sum(len(batch.files) for batch in self.batches)

    @property
    def read_bytes(self) -> int:
        """Bytes of tensors that are read."""
        return sum(target.read_bytes for target in self.targets)

    @property
    def write_bytes(self) -> int:
        """Bytes of tensors that are written."""
        return sum(map(self._write_bytes, self.targets))

    @property
    def peak_bytes(self) -> int:
        """The most bytes that buffers take at once; tensors are moved one after another."""
        return max((target.peak_bytes for target in self.targets), default=0)

    def _write_bytes(self, target: Target) -> int:
        form = FORMS[self.to]()
        return sum(
            target.shard_bytes(rank) for cell in target.cells for rank in form.writers_of(cell)
        )

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [
            ("tensor", "dtype", "shape", "layout", "read", "written", "peak")
        ]
        rows += map(self._row, self.targets)
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        # Long names are shortened, so that lines fit into ``_COLUMNS``.
        widths[0] = min(widths[0], max(16, _COLUMNS - sum(widths[1:]) - 2 * len(widths[1:])))
        cells = ((_shortened(name, widths[0]), *rest) for name, *rest in rows)
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
        for what, names in (
            ("carried along", self.carried),
            ("left out, no tensors", self._left_out()),
            ("left out, not in the index", self.source.unnamed),
        ):
            if names:
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                lines.append(f"{what}: {', '.join(names[:3])}{more}")
        return "\n".join([*lines, *self._total_lines()])

    def _left_out(self) -> tuple[str, ...]:
        """Names of the entries and metadata of the source that the result does not hold."""
        metadata = sorted(set(self.source.metadata) - set(self.metadata))
        return *self.source.others, *(f"__metadata__ {name}" for name in metadata)

    def _row(self, target: Target) -> tuple[str, ...]:
        src, dst = target.source.dtype, target.dtype
        return (
            target.name,
            dst if src == dst else f"{src}>{dst}",
            "x".join(map(str, target.layout.shape)) or "scalar",
            str(target.layout.rvd),
            bytes_text(target.read_bytes),
            bytes_text(self._write_bytes(target)),
            bytes_text(target.peak_bytes),
        )

    def _total_lines(self) -> tuple[str, str]:
        num_files = len(self.source.files)
        return (
            f"total  {len(self.targets)} tensors, {num_files} -> {self.num_files} files, "
            f"{self.source.kind} -> {self.to}",
            f"       read {bytes_text(self.read_bytes)}, write {bytes_text(self.write_bytes)}, "
            f"peak {bytes_text(self.peak_bytes)}",
        )


def _shortened(name: str, width: int) -> str:
    return name if len(name) <= width else f"{name[: width // 3]}..{name[2 + width // 3 - width :]}"


def plan_reshard(
    src_dir: str | Path,
    rules: Rules | None = None,
    *,
    to: str = "sharded",
    dtype: str | None = None,
    memory_limit: int = DEFAULT_MEMORY_LIMIT,
    max_file_bytes: int = DEFAULT_MAX_FILE_BYTES,
    tensors_only: bool = False,
    index: str | None = None,
    follow_symlinks: bool = False,
) -> ReshardPlan:
    """Plan a reshard. Nothing is written; only the descriptions of the source are read.

    Args and errors are those of ``reshard``.
    """
    source = open_checkpoint(
        src_dir, index=index, tensors_only=tensors_only, follow_symlinks=follow_symlinks
    )
    rules = rules or Rules()
    if to not in FORMS:
        raise CheckpointError(f"to={to!r} is no kind of checkpoint; use {', '.join(FORMS)}.")
    if to == "whole" and (rules.layouts or len(rules.ranks) > 1):
        raise CheckpointError("to='whole' keeps every tensor whole; leave out layouts and ranks.")
    if memory_limit < MIN_MEMORY_LIMIT:
        raise CheckpointError(
            f"memory_limit={memory_limit} is too small: use at least {MIN_MEMORY_LIMIT} bytes."
        )
    if source.others and not tensors_only:
        raise CheckpointError(
            f"{src_dir} holds {len(source.others)} entries that are no tensors, such as "
            f"{quoted(source.others[0])}; they are pickles, which are never read. Say "
            "--tensors-only (tensors_only=True) to leave them out."
        )
    metadata = _metadata(source, to, tensors_only)
    targets = _targets(source, rules, to, dtype, memory_limit)
    others = carried(source.folder, source.folder.names()) if to == "whole" else ()
    steps = tuple(map(str, rules.steps))
    return ReshardPlan(source, to, _batches(targets, to, max_file_bytes), metadata, others, steps)


def _metadata(source: Catalog, to: str, tensors_only: bool) -> dict[str, str]:
    """Texts about the model for the headers of the result."""
    kept = {key: texts[0] for key, texts in source.metadata.items() if len(texts) == 1}
    if to == "dcp":
        kept = {}
    if (lost := sorted(set(source.metadata) - set(kept))) and not tensors_only:
        texts = source.metadata[lost[0]]
        reason = "a checkpoint of torch.distributed has no place for it"
        if len(texts) > 1:
            reason = f"files have different texts, {quoted(texts[0])} and {quoted(texts[1])}"
        raise CheckpointError(
            f"{source.folder.root}: __metadata__ {quoted(lost[0])} cannot be kept: {reason}. Say "
            "--tensors-only (tensors_only=True) to leave it out."
        )
    return kept


def _targets(
    source: Catalog, rules: Rules, to: str, dtype: str | None, memory_limit: int
) -> list[Target]:
    targets: dict[str, Target] = {}
    tensors = _stepped(source, rules)
    rules.check_used(tensors)
    for name, tensor in tensors.items():
        layout = rules.layout(name, tensor.shape)
        wanted = _dtype(tensor, dtype)
        if tensor.num_parts > 1 and tensor.dtype in NOT_SUMMED:
            raise CheckpointError(
                f"tensor {tensor.name!r} is in {tensor.num_parts} value parts of {tensor.dtype}, "
                "which has no sum."
            )
        check_summable(wanted, [layout])
        if to == "dcp" and layout.rvd.v > 1:
            raise LayoutError(
                f"tensor {name!r}: {layout.rvd} has V({layout.rvd.v}), and a checkpoint of "
                "torch.distributed holds no value parts; use V(1)."
            )
        targets[name] = Target(name, tensor, wanted, layout, memory_limit)
    return [targets[name] for name in sorted(targets)]


def _stepped(source: Catalog, rules: Rules) -> dict[str, StoredTensor]:
    """The tensors of the source by their names in the result, after all steps."""
    tensors: dict[str, StoredTensor] = {}
    names = rules.names(source.tensors)
    for tensor in source.tensors.values():
        if (before := tensors.setdefault(names[tensor.name], tensor)) is not tensor:
            raise LayoutError(
                f"rename gives {tensor.name!r} and {before.name!r} the same name, "
                f"{names[tensor.name]!r}."
            )
    if rules.steps:  # Steps and their errors use the names after rename.
        tensors = {name: replace(tensor, name=name) for name, tensor in tensors.items()}
    for step in rules.steps:
        tensors = step.apply(tensors)
    return tensors


def _dtype(tensor: StoredTensor, dtype: str | None) -> str:
    if dtype is None:
        return tensor.dtype
    wanted = dtype_name(dtype)
    if wanted not in CONVERTED:
        raise CheckpointError(
            f"cannot convert to {wanted}: it needs a scale; use one of {', '.join(CONVERTED)}."
        )
    return wanted if tensor.dtype in CONVERTED else tensor.dtype


def _batches(targets: Iterable[Target], to: str, max_file_bytes: int) -> tuple[TargetBatch, ...]:
    """Group the tensors, in order of names, so that no rank's file exceeds ``max_file_bytes``.

    A shard that is larger than that has a file of its own.
    """
    groups: list[list[Target]] = []
    filled: Counter[int] = Counter()
    for target in targets:
        sizes = Counter({rank: target.shard_bytes(rank) for rank in target.layout.ranks})
        if not groups or any(filled[r] + sizes[r] > max_file_bytes for r in sizes if filled[r]):
            groups.append([])
            filled = Counter()
        groups[-1].append(target)
        filled += sizes
    return tuple(_batch(group, i, len(groups), to) for i, group in enumerate(groups))


def _batch(group: list[Target], number: int, num_batches: int, to: str) -> TargetBatch:
    # Tensors with large elements come first, so every tensor starts at a multiple of its item size.
    ordered = sorted(group, key=lambda t: (-ITEM_BYTES[t.dtype], t.name))
    ranks = sorted({rank for target in group for rank in target.layout.ranks})
    names = {rank: FORMS[to]().file_name(rank, number, num_batches) for rank in ranks}
    return TargetBatch(tuple(ordered), names)
