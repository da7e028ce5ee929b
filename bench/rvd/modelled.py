"""The cases on a network, planned and priced: no process is started and nothing is measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bench.rvd.cases import Case, Groups, Row, cluster_groups
from bench.rvd.methods import ITEM_BYTES, point_to_point_traffic
from bench.rvd.progress import Progress
from bench.rvd.row import row_of
from rvdcomm import Network, plan
from rvdcomm.cost import step_cost


def groups_on(network: Network) -> Groups:
    """The groups of a cluster whose two hosts are the lower and the upper half of the ranks.

    Raises:
        SystemExit: the network has one rank, which cannot be halved.
    """
    ranks = network.ranks
    if len(ranks) < 2:
        raise SystemExit(f"bench: --network needs 2 ranks or more; this one has {len(ranks)}.")
    return {
        relation: ([ranks[i] for i in src], [ranks[i] for i in dst])
        for relation, (src, dst) in cluster_groups(2, len(ranks) // 2).items()
    }


def rows_on(network: Network, cases: Sequence[Case]) -> Iterator[Row]:
    """A row per case; the sample of a method is its modelled time, the limit that of the bound.

    Point-to-point sends all its messages at once.
    """
    progress = Progress(len(cases))
    for num_done, case in enumerate(cases, 1):
        found = plan(*case.layouts, "float32", network)
        messages = step_cost(point_to_point_traffic(*case.layouts, ITEM_BYTES), network)
        samples = {"ours": [found.cost.secs], "p2p": [messages.secs]}
        yield {**row_of(case, found, samples), "limit_secs": found.bound.secs}
        progress.show(num_done, case.name)
    progress.close()
