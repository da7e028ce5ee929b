"""A first look: an all-reduce over two hosts, planned, verified and simulated without processes.

Run it: python examples/first_look.py
"""

import numpy as np

import rvdcomm as rv

fast, slow = rv.Link(5e-6, 100e9), rv.Link(20e-6, 10e9)  # seconds a message, bytes a second
hosts = rv.Topology.hosts([range(4), range(4, 8)], intra=fast, inter=slow)
src = rv.Layout((1024, 1024), "R(1)V(8)D(1,1)")  # each of 8 ranks holds one summand
dst = rv.Layout((1024, 1024), "R(8)V(1)D(1,1)")  # each of them wants the sum
plan = rv.plan(src, dst, "float32", hosts)
print(plan)

plan.verify()  # a proof over all ranks, or a ProgramError
rng = np.random.default_rng(seed=0)
summands = {rank: rng.integers(100, size=(1024, 1024)).astype("float32") for rank in range(8)}
result = rv.simulate(plan, summands)
assert all(np.array_equal(result.shards[rank], sum(summands.values())) for rank in range(8))
print("sent", result.wire_bytes, "planned", plan.cost.wire_bytes, "bound", plan.bound.wire_bytes)
