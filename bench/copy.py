"""Time copy programs, compared with memcpy, torch and a device-to-device copy."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from bench.command_line import parser_for
from bench.result import environment, write
from rvdcomm import _C

DESCRIPTION = """\
Time the native copy engine beside what does the same work elsewhere, one after the other in one
loop, so that a busy machine slows both; figures are medians.

  runs     blocks of columns for 4 peers, by bytes of a run; beside it memcpy of as many bytes
  gather   the columns of one peer only
  pack     the rows of D(n,1) -> D(1,n) for n peers, as one program; beside it torch's
           cat([part.contiguous().view(-1) for part in x.chunk(n, 1)], out=...), and memcpy
  unpack   the reverse: n received pieces into the columns of one array; beside it
           torch.cat(dim=1, out=...)
  sum      4 parts added in one pass; beside it torch's add_ one after another
  small    1 KiB: what a call costs
  gpu      the same on the GPU by event times, 4 x the bytes: gather, pack, unpack, sum; beside
           torch's, and a device-to-device copy
"""

EPILOG = """\
examples:
  python -m bench.copy                       # all rows, 64 MiB
  python -m bench.copy --mib 16 --secs 0.3   # smaller and quicker
"""

KIB, MIB = 1 << 10, 1 << 20
Work = Callable[[], object]


def side(buffer: int, tensor: torch.Tensor) -> tuple[int, str, int, tuple[int, ...]]:
    return (
        buffer,
        str(tensor.dtype).removeprefix("torch."),
        int(tensor.storage_offset()),
        tensor.stride(),
    )


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def program(dst: torch.Tensor, srcs: list[torch.Tensor], num_threads: int) -> Work:
    """The function that runs ``dst = sum(srcs)``, compiled as a copy program of one op."""
    sides = [side(i + 1, src) for i, src in enumerate(srcs)]
    made = _C.CopyProgram([(tuple(dst.shape), side(0, dst), sides)])
    addresses = [address(t) for t in (dst, *srcs)]
    return lambda: made.run(addresses, num_threads)


def tensor(array: np.ndarray) -> torch.Tensor:
    """A tensor in numpy's memory, which uses huge pages, so that all buffers have equal pages."""
    return torch.from_numpy(array)


def size_text(num_bytes: int) -> str:
    return f"{num_bytes} B" if num_bytes < KIB else f"{num_bytes // KIB} KiB"


def alternate(works: dict[str, Work], secs: float, calls: int) -> dict[str, list[float]]:
    """Seconds per call: samples of ``calls`` calls each; the works alternate until time is up."""
    samples: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        work()
    end = time.perf_counter() + secs
    while time.perf_counter() < end or len(samples[next(iter(works))]) < 5:
        for name, work in works.items():
            start = time.perf_counter()
            for _ in range(calls):
                work()
            samples[name].append(round((time.perf_counter() - start) / calls, 10))
    return samples


class Bench:
    """Measures the rows of the result and collects them."""

    def __init__(self, num_bytes: int, secs: float, num_threads: int) -> None:
        self.num_bytes, self.secs, self.num_threads = num_bytes, secs, num_threads
        self.rows: list[dict[str, Any]] = []

    def row(
        self, kind: str, what: str, num_bytes: int, works: dict[str, Work], calls: int = 1
    ) -> None:
        """Measure one row: ``ours`` and its baselines."""
        samples = alternate(works, self.secs, calls)
        self.rows.append({"kind": kind, "what": what, "bytes": num_bytes, "samples": samples})
        print(line(self.rows[-1]), flush=True)

    def memcpy(self) -> Work:
        dst, src = np.empty(self.num_bytes, np.uint8), filled(self.num_bytes)
        return lambda: np.copyto(dst, src)

    def runs(self) -> None:
        """Blocks of columns for 4 peers; every byte is read once and written once."""
        memcpy = self.memcpy()
        for run in (16, 32, 64, 256, 1 * KIB, 4 * KIB, 16 * KIB, 64 * KIB):
            src = tensor(filled(self.num_bytes)).view(-1, 4, run).transpose(0, 1)
            dst = tensor(np.empty(self.num_bytes, np.uint8)).view(src.shape)
            works = {"ours": program(dst, [src], self.num_threads), "memcpy": memcpy}
            self.row("runs", size_text(run), self.num_bytes, works)

    def gathers(self) -> None:
        """One of 4 blocks of columns; short runs read more, because memory moves whole lines."""
        memcpy = self.memcpy()
        for run in (16, 256, 4 * KIB):
            src = tensor(filled(4 * self.num_bytes)).view(-1, 4 * run)[:, run : 2 * run]
            dst = tensor(np.empty(self.num_bytes, np.uint8)).view(src.shape)
            works = {"ours": program(dst, [src], self.num_threads), "memcpy": memcpy}
            self.row("gather", size_text(run), self.num_bytes, works)

    def packs(self) -> None:
        memcpy = self.memcpy()
        for peers, width in PACKS:
            x = tensor(filled(self.num_bytes)).view(torch.float32).view(-1, width)
            packed = tensor(np.empty(x.numel(), np.float32))
            pack, unpack = map(_C.CopyProgram, pack_ops(x, peers))
            addresses = [address(x), address(packed)]

            def run(made: Any, addresses: list[int] = addresses) -> Work:
                return lambda: made.run(addresses, self.num_threads)

            for kind, ours, theirs in (
                ("pack", run(pack), torch_pack(x, packed, peers)),
                ("unpack", run(unpack), torch_unpack(x, packed, peers)),
            ):
                works = {"ours": ours, "torch": theirs, "memcpy": memcpy}
                self.row(kind, pack_text(x, peers), self.num_bytes, works)

    def sums(self) -> None:
        for dtype in SUMMED:
            count = self.num_bytes // dtype.itemsize
            parts = [tensor(filled(self.num_bytes)).view(dtype) for _ in range(4)]
            for part in parts:
                part.copy_(torch.randn(count))
            dst, total = (tensor(np.empty(self.num_bytes, np.uint8)).view(dtype) for _ in range(2))
            works = {
                "ours": program(dst, parts, self.num_threads),
                "torch": torch_sum(parts, total),
            }
            self.row("sum", sum_text(dtype), self.num_bytes, works)

    def small(self) -> None:
        src = torch.arange(512, dtype=torch.float32).view(32, 16)[:, :8]
        dst = torch.empty(32, 8)
        ours = program(dst, [src], self.num_threads)
        empty = _C.CopyProgram([])
        works: dict[str, Work] = {
            "ours": ours,
            "empty program": lambda: empty.run([], 1),
            "torch": lambda: dst.copy_(src),
        }
        self.row("small", "1 KiB", KIB, works, calls=1000)

    def gpu(self) -> None:
        """Measure the rows on the GPU; without a GPU, add a row that says so."""
        if not (_C.has_cuda and torch.cuda.is_available()):
            self.rows.append({"kind": "gpu", "what": "not measured: no GPU here"})
            print(line(self.rows[-1]), flush=True)
            return
        num_bytes = 4 * self.num_bytes
        for what, works in (
            *_gathers_on_gpu(num_bytes),
            *_packs_on_gpu(num_bytes),
            *_sums_on_gpu(num_bytes),
        ):
            samples = by_events(works)
            row = {"kind": "gpu", "what": what, "bytes": num_bytes, "samples": samples}
            self.rows.append(row)
            print(line(row), flush=True)


NUM_EVENTS = 30
"""Samples per row on the GPU; every buffer is several times as large as the GPU's cache."""


def by_events(works: dict[str, Work]) -> dict[str, list[float]]:
    """Seconds of every call, measured with CUDA events; the works alternate."""
    event: Any = torch.cuda.Event  # Torch has no types for it.
    samples: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(3):
        for work in works.values():
            work()
    for _ in range(NUM_EVENTS):
        for name, work in works.items():
            begin, end = (event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            end.synchronize()
            samples[name].append(begin.elapsed_time(end) / 1e3)
    return samples


def on_gpu(ops: list[Any], buffers: list[torch.Tensor]) -> Work:
    """The function that runs ``ops`` as a copy program on the GPU."""
    made = _C.CopyProgram(ops)
    addresses, stream = [address(x) for x in buffers], torch.cuda.current_stream().cuda_stream
    return lambda: made.run_cuda(addresses, stream)


def bytes_on_gpu(num_bytes: int) -> torch.Tensor:
    return torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device="cuda")


def _gathers_on_gpu(num_bytes: int) -> Iterator[tuple[str, dict[str, Work]]]:
    """One of 4 blocks of columns, compared with a device-to-device copy."""
    for run in (16, 64, 256, 4 * KIB):
        src = bytes_on_gpu(4 * num_bytes)
        view = src.view(-1, 4 * run)[:, run : 2 * run]
        dst, plain = (torch.empty(num_bytes, dtype=torch.uint8, device="cuda") for _ in range(2))
        out = dst.view(view.shape)
        yield (
            f"gather {size_text(run)}",
            {
                "ours": on_gpu([(tuple(view.shape), side(0, out), [side(1, view)])], [dst, src]),
                "torch": lambda out=out, view=view: out.copy_(view),
                "memcpy": lambda plain=plain, src=src: plain.copy_(src[:num_bytes]),
            },
        )


def _packs_on_gpu(num_bytes: int) -> Iterator[tuple[str, dict[str, Work]]]:
    """The same packs and unpacks as on the CPU."""
    for peers, width in PACKS:
        x = bytes_on_gpu(num_bytes).view(torch.float32).view(-1, width)
        packed, plain = torch.empty(x.numel(), device="cuda"), torch.empty_like(x)
        pack, unpack = (on_gpu(ops, [x, packed]) for ops in pack_ops(x, peers))
        memcpy = {"memcpy": lambda plain=plain, x=x: plain.copy_(x)}
        text = pack_text(x, peers)
        yield f"pack {text}", {"ours": pack, "torch": torch_pack(x, packed, peers), **memcpy}
        yield f"unpack {text}", {"ours": unpack, "torch": torch_unpack(x, packed, peers), **memcpy}


def _sums_on_gpu(num_bytes: int) -> Iterator[tuple[str, dict[str, Work]]]:
    """The same sums as on the CPU."""
    for dtype in SUMMED:
        count = num_bytes // dtype.itemsize
        parts = [torch.randn(count, device="cuda", dtype=dtype) for _ in range(4)]
        dst, total = torch.empty_like(parts[0]), torch.empty_like(parts[0])
        sides = [side(i + 1, part) for i, part in enumerate(parts)]
        ours = on_gpu([((count,), side(0, dst), sides)], [dst, *parts])
        yield f"sum {sum_text(dtype)}", {"ours": ours, "torch": torch_sum(parts, total)}


# --- shared by the rows on the CPU and on the GPU -----------------------------------------------

PACKS = ((4, 1024), (8, 64), (4, 16))
"""(Number of peers, float32 values per row of the matrix)."""

SUMMED = (torch.float32, torch.bfloat16)


def pack_ops(x: torch.Tensor, peers: int) -> tuple[list[Any], list[Any]]:
    """Ops that pack the columns of ``x`` (buffer 0) into a piece per peer (buffer 1), and back."""
    rows, width = x.shape
    part = width // peers
    columns = [(0, "float32", p * part, (width, 1)) for p in range(peers)]
    pieces = [(1, "float32", p * rows * part, (part, 1)) for p in range(peers)]
    pairs = list(zip(columns, pieces, strict=True))
    return [((rows, part), b, [a]) for a, b in pairs], [((rows, part), a, [b]) for a, b in pairs]


def pack_text(x: torch.Tensor, peers: int) -> str:
    return f"{peers} x {4 * x.shape[1] // peers} B"


def torch_pack(x: torch.Tensor, packed: torch.Tensor, peers: int) -> Work:
    return lambda: torch.cat([c.contiguous().view(-1) for c in x.chunk(peers, 1)], out=packed)


def torch_unpack(x: torch.Tensor, packed: torch.Tensor, peers: int) -> Work:
    part = x.shape[1] // peers
    return lambda: torch.cat([c.view(-1, part) for c in packed.chunk(peers)], dim=1, out=x)


def sum_text(dtype: torch.dtype) -> str:
    return f"4 x {str(dtype).removeprefix('torch.')}"


def torch_sum(parts: list[torch.Tensor], total: torch.Tensor) -> Work:
    """The sum as torch does it: one part after another."""

    def add() -> None:
        torch.add(parts[0], parts[1], out=total)
        for part in parts[2:]:
            total.add_(part)

    return add


def filled(num_bytes: int) -> np.ndarray:
    """An array that is not all zero, so that every page of it is really allocated."""
    return (np.arange(num_bytes // 8, dtype=np.uint64) * 0x9E3779B97F4A7C15).view(np.uint8)


def middle(row: dict[str, Any], name: str) -> float:
    return float(median(row["samples"][name]))


HEADER = (
    f"{'':8} {'':17} {'MiB':>6} {'ours us':>10} {'ours GB/s':>10}   baselines: us (x ours' speed)"
)


def line(row: dict[str, Any]) -> str:
    if "samples" not in row:
        return f"{row['kind']:8} {row['what']}"
    ours = middle(row, "ours")
    others = [
        f"{name} {middle(row, name) * 1e6:.1f} ({middle(row, name) / ours:.2f})"
        for name in row["samples"]
        if name != "ours"
    ]
    size = row["bytes"] / MIB
    return (
        f"{row['kind']:8} {row['what']:17} {size:6.4g} {ours * 1e6:10.1f} "
        f"{row['bytes'] / ours / 1e9:10.2f}   {'; '.join(others)}"
    )


def table(result: Mapping[str, Any]) -> str:
    """A line per row: our time and rate, and the time of each baseline over ours."""
    return "\n".join([HEADER, *map(line, result["rows"])])


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw the speed of the copy engine over each baseline; 1 means equally fast."""
    from matplotlib.figure import Figure

    rows = [row for row in result["rows"] if "samples" in row and row["kind"] != "small"]
    figure = Figure(figsize=(9, 0.36 * len(rows) + 1.4), layout="constrained")
    axes = figure.subplots()
    for name, color, shift in (("memcpy", "#3b6ea5", -0.2), ("torch", "#d08c3c", 0.2)):
        at = [i for i, row in enumerate(rows) if name in row["samples"]]
        speed = [middle(rows[i], name) / middle(rows[i], "ours") for i in at]
        # Bars start at 1, so that a bar to the left means slower than the baseline.
        widths = [value - 1 for value in speed]
        axes.barh([i + shift for i in at], widths, 0.38, 1, color=color, label=f"beside {name}")
        for i, value in zip(at, speed, strict=True):
            axes.text(max(value, 1), i + shift, f" {value:.2f}", va="center", fontsize=7)
    axes.set_xscale("log")
    axes.set_xticks([0.5, 1, 2, 5, 10, 20], ["0.5", "1", "2", "5", "10", "20"])
    axes.minorticks_off()
    axes.axvline(1, color="#444444", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [f"{row['kind']} {row['what']}" for row in rows])
    axes.invert_yaxis()
    axes.margins(x=0.08)
    axes.set_xlabel("speed of the copy engine: times the baseline's (1 is as fast)")
    axes.set_title(result["title"], fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)


def main(argv: list[str] | None = None) -> int:
    """Measure, print a table, and write a JSON file and a plot."""
    parser = parser_for("copy", DESCRIPTION, EPILOG)
    parser.add_argument("--mib", type=int, default=64, help="bytes written a row, in MiB (64)")
    parser.add_argument("--secs", type=float, default=1.0, help="time for a row (1 s)")
    parser.add_argument("--threads", type=int, default=1, help="threads of both sides (1)")
    parser.add_argument("--only", help="kinds, comma separated, such as 'runs,pack'")
    parser.add_argument("--out", type=Path, default=Path("bench/results/scratch/copy.json"))
    words = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(words)
    torch.set_num_threads(args.threads)
    bench = Bench(args.mib * MIB, args.secs, args.threads)
    kinds = {"runs": bench.runs, "gather": bench.gathers, "pack": bench.packs, "sum": bench.sums,
             "small": bench.small, "gpu": bench.gpu}  # fmt: skip
    print(HEADER)
    for kind, measure in kinds.items():
        if args.only is None or kind in args.only.split(","):
            measure()
    title = f"Copy programs, {args.mib} MiB a row, {args.threads} thread(s)"
    result = {"title": title, **environment("copy", words), "rows": bench.rows}
    write(result, args.out, partial(plot, result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
