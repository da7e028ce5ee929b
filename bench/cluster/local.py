"""Run the ranks of one world as processes of this machine."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from bench.cluster.ranks import Launch, run_ranks


def run_here(world_size: int, command: Sequence[str], *, timeout_secs: float) -> None:
    """Run ``command`` once per rank, with the environment variables that torchrun sets.

    Raises:
        RankFailedError, RankTimeoutError: as in ``run_ranks``.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    launches = [
        Launch(
            rank, 0, command, {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        )
        for rank in range(world_size)
    ]
    run_ranks(launches, timeout_secs=timeout_secs)
