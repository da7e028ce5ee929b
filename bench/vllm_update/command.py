"""Updates of a vLLM engine on another host, beside broadcasts by hand.

Two trainers with the shards of FSDP2 (float32) on one emulated host, and an engine of vLLM with two
tensor-parallel workers on another. All ways alternate in one run:

  rvd     ``rvdcomm.interop.vllm.Sender``: each worker gets its own share of every tensor
  whole   the first trainer has the whole model already, and broadcasts it over gloo
  shards  each trainer broadcasts its shards over gloo

Times of the broadcasts leave out everything but the broadcasts; those of rvd are whole updates, of
which ``load`` is vLLM's reload. Needs root, and vLLM: run it in the environment of ``make
vllm-test``.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from bench.cluster.emulated import Cluster, ClusterUnavailableError, parse_rate
from bench.command_line import at_least_one, parser_for
from bench.result import environment, write
from rvdcomm.units import bytes_text

EPILOG = """\
examples:
  .venv-vllm/bin/python -m bench.vllm_update                      # some minutes
  .venv-vllm/bin/python -m bench.vllm_update --rate 500mbit --layers 2
"""


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    words = sys.argv[1:] if argv is None else argv
    parser = parser_for("vllm_update", __doc__, EPILOG)
    parser.add_argument("--rate", default="1gbit", help="of a host's link (default 1gbit)")
    parser.add_argument("--layers", type=at_least_one, default=6, help="of the Llama (default 6)")
    parser.add_argument("--updates", type=at_least_one, default=5, help="of each way (default 5)")
    parser.add_argument("--out", type=Path, help="result file (default: none)")
    args = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as text:
        config = {"layers": args.layers, "updates": args.updates, "folder": text}
        try:
            with Cluster(2, 2, parse_rate(args.rate)) as cluster:
                stream = cluster.measure_stream(1.0)
                command = [sys.executable, "-m", "bench.vllm_update.rank", json.dumps(config)]
                env = {"PYTHONPATH": os.getcwd()}
                cluster.run(command, timeout_secs=900, env=env)
        except ClusterUnavailableError as error:
            print(f"bench: {error}", file=sys.stderr)
            return 2
        found = json.loads(Path(text, "found.json").read_text())
    result = {"rate": args.rate, "stream_bytes_per_sec": stream, **found}
    print(table(result))
    if args.out:
        write({**environment("vllm_update", words), **result}, args.out)
    return 0


def table(result: dict[str, Any]) -> str:
    """The result in text."""
    secs = {way: median(samples) for way, samples in result["secs"].items()}
    transfer = secs["rvd"] - median(result["load_secs"])
    lines = [
        f"{bytes_text(result['model_bytes'])} (float32), 2 trainers -> 2 workers, "
        f"{result['rate']}, one stream {bytes_text(result['stream_bytes_per_sec'])}/s",
        f"rvd     {secs['rvd']:6.2f} s, of which load {secs['rvd'] - transfer:.2f} s",
    ]
    for way in ("whole", "shards"):
        lines.append(
            f"{way:7} {secs[way]:6.2f} s: {secs[way] / transfer:.2f} x the transfer of rvd, "
            f"{(secs[way] + secs['rvd'] - transfer) / secs['rvd']:.2f} x with the same load"
        )
    for worker, (share, got) in enumerate(result["worker_bytes"]):
        lines.append(
            f"worker {worker}: share {bytes_text(share)}, received {got / share:.4f} of it at its "
            "sockets"
        )
        for peer, num_bytes in result["worker_bytes_of_peers"][worker].items():
            lines.append(f"  {peer} by its rules: {num_bytes / share:.4f} of it")
    gathered = result["trainer_bytes_of_sharded_rdt"]
    lines.append(f"each trainer would gather {bytes_text(gathered)} for sharded_rdt, and 0 for rvd")
    return "\n".join(lines)
