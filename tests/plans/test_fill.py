"""Laws of filling: every tensor once, all classes in turn, no bucket over its share of memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

import rvdcomm as rv
from bench.weights.models import MOE_MODELS, MoeModel
from rvdcomm.cost import port_secs
from rvdcomm.plans.bundle import Bundle
from rvdcomm.plans.fill import filled, in_turn
from rvdcomm.plans.member import Member
from tests.covering import each_value
from tests.plans.test_bundle import random_bundle

ROOT = Path(__file__).resolve().parents[2]
SHARES = [64, 4 << 10, 32 << 20]

shares = each_value(seed=range(12), share=SHARES)


def moe_bundle(model: MoeModel, num_hosts: int, ranks_per_host: int, **options: object) -> Bundle:
    """Two thirds of the hosts train the model, in four stages; one third serves it."""
    num_ranks = num_hosts * ranks_per_host
    trainers, readers = range(num_ranks * 2 // 3), range(num_ranks * 2 // 3, num_ranks)
    hosts = [range(i, i + ranks_per_host) for i in range(0, num_ranks, ranks_per_host)]
    topology = rv.Topology.hosts(hosts, rv.Link(3e-6, 380e9), rv.Link(12e-6, 50e9))
    layouts = model.trainer(trainers, 4), model.server(readers, ranks_per_host)
    return rv.plan_many(*layouts, "bfloat16", topology=topology, **options)


@shares
def test_every_lane_of_every_tensor_is_in_one_bucket(seed: int, share: int) -> None:
    members = random_bundle(seed).members
    batches = filled(members, share)
    assert Counter(i for batch in batches for i in batch.members) == Counter(range(len(members)))
    for batch in batches:
        lanes = [
            (t, lane)
            for t, (i, n) in enumerate(zip(batch.members, batch.num_slices, strict=True))
            for lane in range(members[i].tensor_plan.num_lanes(n))
        ]
        assert sorted(unit for bucket in batch.buckets for unit in bucket) == lanes


@shares
def test_staging_of_a_bucket_exceeds_its_cap_only_with_a_single_lane(seed: int, share: int) -> None:
    members = random_bundle(seed).members
    for batch in filled(members, share):
        tensor_plans = [members[i].tensor_plan for i in batch.members]
        cap = share // max(tensor_plan.num_phases for tensor_plan in tensor_plans)
        for bucket in batch.buckets:
            staged: dict[int, list[int]] = {}
            for tensor, _ in bucket:
                bound = tensor_plans[tensor].staging_bound(batch.num_slices[tensor])
                for rank, num_bytes in bound.items():
                    staged.setdefault(rank, []).append(num_bytes)
            assert all(sum(sizes) <= cap or len(sizes) == 1 for sizes in staged.values())
            assert all(sum(sizes) <= batch.staging_bound for sizes in staged.values())


def class_of(member: Member) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return member.transition.src.ranks, member.transition.dst.ranks


def size_of(member: Member) -> int:
    shape = member.transition.src.shape
    return shape[0] * shape[1] + 1


def test_classes_of_tensors_send_equal_shares_within_half_an_item() -> None:
    members = moe_bundle(MoeModel(9, 64, 24, 24, 8, 16, 64), 12, 2).members
    order = in_turn(members, lambda member: member.tensor_plan)
    assert Counter(order) == Counter(members)
    total, largest = Counter[object](), Counter[object]()
    for member in order:
        total[class_of(member)] += size_of(member)
        largest[class_of(member)] = max(largest[class_of(member)], size_of(member))
    assert len(total) > 20
    sent = Counter[object]()
    for member in order:
        mine = class_of(member)
        # The place of the member: members are sent in ascending order of their places.
        place = (sent[mine] + size_of(member) / 2) / total[mine]
        for other, num_elements in sent.items():
            assert abs(num_elements - place * total[other]) <= largest[other] / 2 * (1 + 1e-9) + 1
        sent[mine] += size_of(member)


def test_tensors_of_a_class_keep_their_order() -> None:
    members = moe_bundle(MoeModel(5, 64, 24, 24, 8, 16, 64), 12, 2).members
    order = in_turn(members, lambda member: member.tensor_plan)
    for one in {class_of(member) for member in members}:
        assert [m for m in order if class_of(m) == one] == [
            m for m in members if class_of(m) == one
        ]


@pytest.mark.parametrize("memory", [None, 64 << 20])
def test_bundle_of_experts_takes_at_most_1_2_times_the_busiest_port(memory: int | None) -> None:
    # The model of 1 T parameters on its 256 + 128 ranks, but with fewer layers and experts.
    model = replace(MOE_MODELS["moe-1t"], num_layers=6, num_experts=128)
    free = moe_bundle(model, 48, 8)
    limit = memory and memory + max(map(free.shard_bytes, free.ranks))
    bundle = moe_bundle(model, 48, 8, memory_limit=limit)
    assert limit is None or bundle.peak_bytes <= limit
    busiest_secs = port_secs(bundle.busiest_bytes, 0, bundle.topology)
    assert busiest_secs <= bundle.cost.secs <= 1.2 * busiest_secs


PROGRAM = """
import rvdcomm as rv
from tests.plans.test_bundle import random_bundle
print([random_bundle(seed, executor="dist").identity for seed in range(6)])
"""


def test_batches_do_not_depend_on_the_hash_seed() -> None:
    texts = set()
    for seed in ("0", "1"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", PROGRAM]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        texts.add(done.stdout)
    assert len(texts) == 1
