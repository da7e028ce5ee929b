"""An emulated cluster on one machine: real processes and sockets, links of a chosen rate.

Hosts are network namespaces joined by a bridge, and each host's link is shaped both ways with
``tc ... tbf``. Ranks of one host communicate over the loopback of their namespace, which is not
shaped. A program thus sees two levels of network, and its times can be compared with the limit of
the link.

Not emulated: latency (a message costs what the local TCP stack costs), separate CPUs
(all ranks share this machine's cores) and separate memory (``/dev/shm`` and the host name are
common to all hosts; ``GROUP_RANK`` tells them apart). TCP's congestion control is the machine's;
BBR and Reno time the same here, within 2 %.

    with Cluster(hosts=2, ranks_per_host=4, rate_bits_per_sec=200e6) as cluster:
        bytes_per_sec = cluster.measure_stream(seconds=1.0)
        cluster.run([sys.executable, "-m", "bench.my_case"], timeout_secs=60)
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from bench.cluster import cleanup, stream
from bench.cluster.netns import (
    ClusterError,
    ClusterUnavailableError,
    call,
    clean_leftovers,
    missing_requirements,
    remove,
    require_support,
)
from bench.cluster.ranks import Launch, RankFailedError, RankResult, RankTimeoutError, run_ranks
from bench.cluster.spec import (
    ClusterSpec,
    build_commands,
    exec_command,
    parse_rate,
    parse_rates,
    rank_env,
    remove_commands,
)

__all__ = [
    "Cluster",
    "ClusterError",
    "ClusterUnavailableError",
    "RankFailedError",
    "RankResult",
    "RankTimeoutError",
    "clean_leftovers",
    "missing_requirements",
    "parse_rate",
    "parse_rates",
]

_serials = itertools.count()


class Cluster:
    """An emulated cluster, alive inside its ``with`` block.

    The cluster is removed when the block ends, also by an exception or by SIGINT, SIGTERM or
    SIGHUP, and at the latest when the process exits.

    Args:
        hosts: number of hosts.
        ranks_per_host: number of ranks that ``run`` starts on each host.
        rate_bits_per_sec: rate of each host's link in each direction; a tuple has one per host.
        nics: links of each host, shared by its ranks in turn.
        wires: pairs of hosts that are wired to each other, in place of a switch.

    Raises:
        ValueError: a number is out of range.
        ClusterUnavailableError: (on entry) no root, no ``ip``, no ``tc``.
        ClusterError: (on entry) the kernel refused a step; everything created so far was removed.
    """

    def __init__(
        self,
        hosts: int,
        ranks_per_host: int,
        rate_bits_per_sec: float | tuple[float, ...],
        *,
        nics: int = 1,
        wires: tuple[tuple[int, int], ...] = (),
    ) -> None:
        self.spec = ClusterSpec(
            hosts,
            ranks_per_host,
            rate_bits_per_sec,
            pid=os.getpid(),
            serial=next(_serials),
            nics=nics,
            wires=wires,
        )
        self._alive = False

    def __enter__(self) -> Self:
        require_support()
        self._alive = True
        cleanup.register(self.close)
        try:
            with cleanup.shielded():
                for command in build_commands(self.spec):
                    call(command)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill all processes in the cluster and remove it; a second call does nothing."""
        with cleanup.shielded():
            if self._alive:
                self._alive = False
                remove(self.spec.namespaces, remove_commands(self.spec))
            cleanup.unregister(self.close)

    def run(
        self,
        command: Sequence[str],
        *,
        timeout_secs: float,
        env: Mapping[str, str] | None = None,
        log_dir: str | Path | None = None,
        echo: bool = True,
    ) -> list[RankResult]:
        """Run ``command`` as every rank and return the result of each, by rank.

        The environment of a rank is ours, overridden by ``rank_env`` and then by ``env``; with it,
        ``torch.distributed.init_process_group("gloo")`` needs no arguments. If one rank fails or
        the time is up, all ranks are stopped.

        Args:
            command: program and arguments, the same for every rank.
            timeout_secs: how long all ranks together may take.
            env: additional environment variables for every rank.
            log_dir: directory that keeps ``rank<N>.stdout`` and ``rank<N>.stderr``.
            echo: copy the output of rank 0 to ours while it runs.

        Raises:
            RankFailedError: names the rank, its status and the tail of its stderr.
            RankTimeoutError: names the ranks that were still running.
        """
        self._require_alive()
        launches = [
            Launch(
                rank=rank,
                host=self.spec.host_of(rank),
                command=exec_command(self.spec, self.spec.host_of(rank), list(command)),
                env={**os.environ, **rank_env(self.spec, rank), **(env or {})},
            )
            for rank in range(self.spec.world_size)
        ]
        directory = None if log_dir is None else Path(log_dir)
        return run_ranks(launches, timeout_secs=timeout_secs, log_dir=directory, echo=echo)

    def measure_stream(self, seconds: float = 1.0) -> float:
        """Return the bytes per second of one plain TCP stream from host 1 to host 0.

        About 95.7 % of the rate: 1448 of the 1514 bytes of a frame are payload.
        """
        self._require_alive()
        if self.spec.hosts < 2:
            raise ValueError("measure_stream needs 2 hosts; this cluster has 1.")
        return stream.measure(
            self.spec.address(0),
            seconds,
            receiver_prefix=exec_command(self.spec, 0, []),
            sender_prefix=exec_command(self.spec, 1, []),
        )

    def _require_alive(self) -> None:
        if not self._alive:
            raise ClusterError("this cluster is not up; use it inside `with Cluster(...) as c:`.")


_DESCRIPTION = """\
Run a command on every rank of an emulated cluster: H hosts (network namespaces of this machine)
joined by a switch, with the rate of every host's link limited both ways. Ranks of one host talk
unlimited. Needs root, and `ip` and `tc` from iproute2; nothing outside its namespaces is touched,
and everything is removed at the end.

Each rank gets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK (its host), MASTER_ADDR,
MASTER_PORT and GLOO_SOCKET_IFNAME, so torch.distributed.init_process_group("gloo") just works.
Rank 0's output is shown; if a rank fails, all are stopped and it is named.
"""

_EPILOG = """\
examples:
  # what one TCP stream reaches between two hosts: the limit to compare with
  python -m bench.cluster --rate 200mbit --measure

  # 2 hosts x 4 ranks
  python -m bench.cluster --hosts 2 --ranks-per-host 4 --rate 200mbit -- python my_program.py

  # one slow host of three
  python -m bench.cluster --hosts 3 --rate 400mbit/400mbit/100mbit -- python my_program.py

  # look at the cluster from inside host 0 and host 1
  python -m bench.cluster --ranks-per-host 1 --log-dir logs -- ip address

exit status: 0 all ranks ended well; 1 a rank or the cluster failed; 2 wrong usage, or this machine
cannot hold a cluster; 124 the ranks took longer than --timeout; 128+N ended by signal N.
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.cluster",
        usage="%(prog)s [options] -- COMMAND [ARGS...]\n"
        "       %(prog)s [options] --measure\n"
        "       %(prog)s --clean",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--hosts", type=int, default=2, metavar="H", help="number of hosts (2)")
    parser.add_argument(
        "--ranks-per-host", type=int, default=1, metavar="N", help="ranks on each host (1)"
    )
    parser.add_argument(
        "--rate",
        type=_rate,
        default="1gbit",
        help="rate of each host's link, each way, in tc's notation: 200mbit, 1gbit, 25MBps; or one "
        "for each host: 400mbit/100mbit (1gbit)",
    )
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="SECS", help="stop all ranks then (600)"
    )
    parser.add_argument("--log-dir", metavar="DIR", help="keep every rank's stdout and stderr here")
    parser.add_argument(
        "--measure", action="store_true", help="run nothing; print the rate of one TCP stream"
    )
    parser.add_argument(
        "--clean",
        action="store_true",
        help="build nothing; remove clusters whose process was killed before it could",
    )
    return parser


def _rate(text: str) -> float | tuple[float, ...]:
    try:
        return parse_rates(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; see ``--help``."""
    argv = sys.argv[1:] if argv is None else list(argv)
    split = argv.index("--") if "--" in argv else len(argv)
    command = argv[split + 1 :]
    parser = _parser()
    args = parser.parse_args(argv[:split])
    if bool(command) + args.measure + args.clean != 1:
        parser.error("give one of: a command after `--`, --measure, --clean")
    try:
        return _dispatch(args, command)
    except ValueError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (ClusterError, RankFailedError, RankTimeoutError, stream.StreamError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return _exit_status(error)


def _exit_status(error: Exception) -> int:
    if isinstance(error, ClusterUnavailableError):
        return 2
    return 124 if isinstance(error, RankTimeoutError) else 1


def _dispatch(args: argparse.Namespace, command: list[str]) -> int:
    if args.clean:
        removed = clean_leftovers()
        print("\n".join(f"removed {name}" for name in removed) or "nothing to remove")
        return 0
    with Cluster(args.hosts, args.ranks_per_host, args.rate) as cluster:
        if args.measure:
            slowest = min(link.rate_bits_per_sec for link in cluster.spec.links[:2])
            _print_stream(cluster.measure_stream(seconds=2.0), slowest)
        else:
            cluster.run(command, timeout_secs=args.timeout, log_dir=args.log_dir)
    return 0


def _print_stream(bytes_per_sec: float, rate_bits_per_sec: float) -> None:
    bits_per_sec = bytes_per_sec * 8
    print(
        f"one TCP stream, host 1 to host 0: {bits_per_sec / 1e6:.2f} Mbit/s "
        f"({bytes_per_sec / 1e6:.2f} MB/s), {bits_per_sec / rate_bits_per_sec:.1%} of the link"
    )
