"""Redistribute DTensors by rvdcomm: between meshes, with gradients, and in DTensor's own calls.

Run it: torchrun --nproc-per-node 4 examples/dtensor.py
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from rvdcomm.interop.dtensor import layout_of, planned, redistribute

dist.init_process_group("gloo")
rank, n = dist.get_rank(), dist.get_world_size()
whole = torch.arange(60.0 * n * n).view(6 * n, 10 * n)

# From all ranks to the last k, and the gradient back. Outside its mesh, a DTensor is empty.
k = (n + 1) // 2
trainer, server = DeviceMesh("cpu", list(range(n))), DeviceMesh("cpu", list(range(n - k, n)))
weight = distribute_tensor(whole, trainer, [Shard(0)]).requires_grad_()
served = redistribute(weight, server, [Shard(1)])
expected = whole.chunk(k, dim=1)[rank - (n - k)] if rank >= n - k else torch.empty(0)
assert torch.equal(served.to_local(), expected)
(served**2).sum().backward()
assert torch.equal(weight.grad.to_local(), 2 * weight.to_local())

# In this block, DTensor's own calls and its implicit redistributions run our plans.
with planned() as tally:
    columns = distribute_tensor(whole, trainer, [Shard(1)])
    total = (weight.detach() + columns).redistribute(placements=[Replicate()])
assert torch.equal(total.to_local(), 2 * whole)
assert tally.planned >= 2
assert not tally.fallbacks

# A mesh with placements as a layout, which can be planned and printed without processes.
assert str(layout_of(trainer, [Shard(0)], whole.shape).rvd) == f"R(1)V(1)D({n},1)"

dist.barrier()
dist.destroy_process_group()
print(f"rank {rank} of {n}: {n} ranks to {k} and back, {tally.planned} by our plans: all right")
