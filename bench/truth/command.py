"""``python -m bench.truth``: predict measured steps of real clusters."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from bench.command_line import at_least_one, parser_for
from bench.result import environment, scratch_path, write
from bench.tables import grid
from bench.truth import scaling, tables
from bench.truth.errors import summary
from bench.truth.fit import collective, fitted
from bench.truth.picture import Pairs, draw
from bench.truth.predict import Prediction, predicted
from bench.truth.published import predictions
from bench.truth.reading import COLLECTIVES, READINGS, Constants
from bench.truth.rows import MISSING, NUM_FIT, Row, all_reduces, folder, rows

FILES = ("single_node", "multi_node")

DEVICE_BYTES = 80 << 30
"""The memory of an A100 with 80 GB."""

DESCRIPTION = """\
Predict steps that were measured on real GPUs, of Megatron-DeepSpeed on 2 to 512 A100s, and print
the errors. The rows come from the folder that RVDCOMM_TRUTH_DATA names; docs/truth.md says where
they are public. Constants are fitted to the first 112 rows of the single-node file alone.

Columns: mean absolute error, bias, and, over groups of rows with equal GPUs, batch and model, the
measured step of the row that the prediction chooses over that of the fastest row; beside it the
same for the trivial rule "the most data parallelism, then the largest microbatch".
"""

EPILOG = """\
examples:
  python -m bench.truth                          # all rows: 15 minutes on 2 cores
  python -m bench.truth --every 10               # a tenth of the rows
  python -m bench.truth --published              # and steps of Megatron-LM from a paper
  python -m bench.truth --scaling                # only throughputs of Megatron-LM from another
  python -m bench.truth --readings --every 10    # other readings of the unknown settings
  python -m bench.truth --fit                    # fit the constants again
  python -m bench.truth --collectives            # NCCL's all-reduce from its measured tables
"""


def main(words: Sequence[str]) -> int:
    """Run the command; the exit status."""
    args = _parse(words)
    if args.scaling:
        papers = [*scaling.predictions(Constants())]
        print(grid(tables.scaled(papers)))
        write({**environment("truth", words), "rows": papers}, args.out or scratch_path())
        return 0
    data = folder()
    if data is None:
        print(MISSING)
        return 2
    if args.collectives:
        print(_collectives(data))
    elif args.fit:
        found, error = fitted(rows(data, FILES[0])[:NUM_FIT], READINGS["as chosen"], Constants())
        print(f"mean absolute error {error:.2%} with {found}")
    else:
        _predict(data, args, words)
    return 0


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = parser_for("truth", DESCRIPTION, EPILOG)
    parser.add_argument(
        "--every", type=at_least_one, default=1, help="of each so many rows the first"
    )
    parser.add_argument("--readings", action="store_true", help="with other readings, too")
    parser.add_argument("--published", action="store_true", help="with published steps, too")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--scaling", action="store_true", help="published throughputs, only")
    only.add_argument("--fit", action="store_true", help="fit the constants to their rows, only")
    only.add_argument("--collectives", action="store_true", help="fit NCCL's all-reduce, only")
    parser.add_argument("--out", type=Path, help="file of the result")
    return parser.parse_args(words)


def _collectives(data: Path) -> str:
    lines = [("GPUs", "latency us", "GB/s", "median error", "in use")]
    for num, used in COLLECTIVES.items():
        found, error = collective(num, all_reduces(data, num))
        now = f"{1e6 * used.latency_secs:.0f} us, {used.bytes_per_sec / 1e9:.0f} GB/s"
        figures = f"{1e6 * found.latency_secs:.1f}", f"{found.bytes_per_sec / 1e9:.1f}"
        lines.append((str(num), *figures, f"{error:.1%}", now))
    return grid(lines)


def _predict(data: Path, args: argparse.Namespace, words: Sequence[str]) -> None:
    constants, panels = Constants(), dict[str, Pairs]()
    found: list[dict[str, Any]] = []
    for name, reading in READINGS.items() if args.readings else [*READINGS.items()][:1]:
        for file in FILES:
            every = rows(data, file)
            mine = every[:: args.every]
            pairs = predicted(mine, reading, constants)
            found += _summaries(name, file, mine, pairs, {*every[:NUM_FIT]})
            if name == "as chosen":
                panels |= {file.replace("_", " "): _pairs(mine, pairs)}
    print(grid(tables.errors(found)))
    papers = [*predictions(constants)] if args.published else []
    if papers:
        print(grid(tables.published(papers)))
    result = {**environment("truth", words), "constants": asdict(constants), "found": found}
    result["published"] = papers
    write(result, args.out or scratch_path(), partial(draw, panels))


def _summaries(
    reading: str, file: str, mine: Sequence[Row], pairs: Sequence[Prediction], first: set[Row]
) -> Iterator[dict[str, Any]]:
    """The figures of a file's rows, and of those to which nothing is fitted."""
    by_row = dict(zip(mine, pairs, strict=True))
    parts = {file: mine}
    others = [row for row in mine if row not in first]
    if file == FILES[0] and others:
        parts |= {f"{file}, not fitted": others}
    for part, of in parts.items():
        yield {
            "reading": reading,
            "part": part,
            **summary(of, [by_row[row][0] for row in of]),
            "does_not_fit": sum(by_row[row][1] > DEVICE_BYTES for row in of),
            "rows": [
                {**row._asdict(), "predicted_secs": by_row[row][0], "peak_bytes": by_row[row][1]}
                for row in (of if part == file else ())
            ],
        }


def _pairs(mine: Sequence[Row], pairs: Sequence[Prediction]) -> Pairs:
    return [(row.secs, secs, row.tp) for row, (secs, _) in zip(mine, pairs, strict=True)]
