"""Run three transitions of a tensor on real processes, and check each result.

Run it: torchrun --nproc-per-node 4 examples/redistribute_gloo.py
"""

import torch
import torch.distributed as dist

import rvdcomm as rv

dist.init_process_group("gloo")
rank, n = dist.get_rank(), dist.get_world_size()
whole = torch.arange(60.0 * n * n).view(6 * n, 10 * n)

# Rows to columns. A text means a layout over all ranks, of a tensor of this shape.
rows = whole.chunk(n, dim=0)[rank]
columns = rv.redistribute(rows, f"R(1)V(1)D({n},1)", f"R(1)V(1)D(1,{n})", shape=whole.shape)
assert torch.equal(columns, whole.chunk(n, dim=1)[rank])

# One summand per rank to rows of the sum: a reduce-scatter.
summed = rv.redistribute((rank + 1) * whole, f"R(1)V({n})D(1,1)", f"R(1)V(1)D({n},1)")
assert torch.equal(summed, n * (n + 1) / 2 * rows)

# From the first k ranks to all others. A rank outside src passes None; one outside dst gets None.
k = (n + 1) // 2
src = rv.Layout(whole.shape, f"R(1)V(1)D({k},1)", ranks=range(k))
dst = rv.Layout(whole.shape, f"R({n - k})V(1)D(1,1)", ranks=range(k, n))
arrived = rv.redistribute(whole.chunk(k)[rank] if rank < k else None, src, dst)
assert arrived is None if rank < k else torch.equal(arrived, whole)

dist.barrier()
dist.destroy_process_group()
print(f"rank {rank} of {n}: rows to columns, summands to rows, {k} ranks to {n - k}: all right")
