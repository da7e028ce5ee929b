"""At rates: a benchmark whose worker runs on emulated clusters, once for every rate of links."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.cluster.emulated import Cluster, ClusterUnavailableError, parse_rate
from bench.environment import environment

TIMEOUT_SECS = 1800.0

Result = dict[str, Any]


def at_rates(
    name: str,
    words: Sequence[str],
    args: argparse.Namespace,
    *,
    given: Sequence[str],
    told: Sequence[str],
    table: Callable[[Result], str],
) -> int:
    """Measure at every rate of ``args.rates``, print a table, and write a JSON to ``args.out``.

    Args:
        name: of the benchmark; its worker is ``bench.NAME_worker``, which is run by every rank with
            the files of its options and of what it found.
        words: the command line.
        args: the same, parsed; ``cluster`` is hosts x ranks.
        given: the options that the worker gets.
        told: the options that the result tells.
        table: the table of a result.

    Returns:
        The exit status: 2 if there can be no emulated cluster here.
    """
    try:
        rows = [_measure(name, args, given, rate) for rate in args.rates.split(",")]
    except ClusterUnavailableError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    result = {
        **environment(shlex.join(["python", "-m", f"bench.{name}", *words])),
        **{option: getattr(args, option) for option in told},
        "rows": rows,
    }
    print(table(result))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {args.out}")
    return 0


def _measure(name: str, args: argparse.Namespace, given: Sequence[str], rate: str) -> Result:
    hosts, ranks_per_host = (int(number) for number in args.cluster.split("x"))
    with (
        Cluster(hosts, ranks_per_host, parse_rate(rate)) as cluster,
        tempfile.TemporaryDirectory() as folder,
    ):
        config, found = Path(folder, "config.json"), Path(folder, "found.json")
        values = {option: getattr(args, option) for option in given}
        config.write_text(json.dumps({**values, "folder": folder}))
        command = [sys.executable, "-m", f"bench.{name}_worker", str(config), str(found)]
        cluster.run(command, timeout_secs=TIMEOUT_SECS)
        result: Result = json.loads(found.read_text())
    return {"rate": rate, **result}
