"""Send a trainer's weights to an inference engine with other ranks, splits and dtype, in one call.

Plan it, at full size, without processes:  python examples/sync_weights.py --dry-run --model 70b
Run it, scaled down:                       torchrun --nproc-per-node 6 examples/sync_weights.py
"""

import argparse
from math import prod

import torch
import torch.distributed as dist

import rvdcomm as rv

# (layers, hidden, intermediate, key-value heads / heads, vocabulary) of Llama-like models
SIZES = {"7b": (32, 4096, 11008, 1.0, 32000), "70b": (80, 8192, 28672, 1 / 8, 32000)}


def weights(layers, hidden, intermediate, kv, vocab):
    """(name, shape, layer, dim that tensor parallelism splits) of every weight."""
    kv = int(hidden * kv)
    yield "embed_tokens.weight", (vocab, hidden), 0, 0
    for i in range(layers):
        yield f"layers.{i}.q_proj.weight", (hidden, hidden), i, 0
        yield f"layers.{i}.k_proj.weight", (kv, hidden), i, 0
        yield f"layers.{i}.v_proj.weight", (kv, hidden), i, 0
        yield f"layers.{i}.o_proj.weight", (hidden, hidden), i, 1
        yield f"layers.{i}.gate_proj.weight", (intermediate, hidden), i, 0
        yield f"layers.{i}.up_proj.weight", (intermediate, hidden), i, 0
        yield f"layers.{i}.down_proj.weight", (hidden, intermediate), i, 1
        yield f"layers.{i}.input_norm.weight", (hidden,), i, None
        yield f"layers.{i}.output_norm.weight", (hidden,), i, None
    yield "norm.weight", (hidden,), layers - 1, None
    yield "lm_head.weight", (vocab, hidden), layers - 1, 0


def layouts(sizes, ranks, tp, pp=1, dp=1):
    """Layouts of all weights: ``dp`` replicas of ``tp`` shards on the ranks of a pipeline stage."""
    found = {}
    for name, shape, layer, dim in weights(*sizes):
        stage = ranks[layer * pp // sizes[0] * tp * dp :][: tp * dp]
        cuts = ",".join(str(tp if d == dim else 1) for d in range(len(shape)))
        replicas = dp if dim is not None else dp * tp
        found[name] = rv.Layout(shape, f"R({replicas})V(1)D({cuts})", stage)
    return found


def dry_run(sizes):
    """Print the plan from TP8 x PP2 x DP4 on eight hosts of eight ranks to TP4 on another host."""
    trainer, engine = range(64), range(64, 68)
    hosts = [range(i, i + 8) for i in range(0, 64, 8)] + [engine]
    cluster = rv.Topology.hosts(hosts, rv.Link(3e-6, 380e9), rv.Link(12e-6, 360e9))
    src, dst = layouts(sizes, trainer, tp=8, pp=2, dp=4), layouts(sizes, engine, tp=4)
    print(rv.plan_many(src, dst, "float32", dst_dtype="bfloat16", topology=cluster))


def run(sizes):
    """Send weights from the training ranks (about two thirds) to the others; check every value."""
    dist.init_process_group("gloo")
    rank, n = dist.get_rank(), dist.get_world_size()
    k = n - max(1, n // 3)
    src, dst = layouts(sizes, range(k), tp=k), layouts(sizes, range(k, n), tp=n - k)

    def shard(name, layout):
        box = layout.cell(rank).box
        whole = torch.arange(prod(layout.shape)).remainder(251).view(layout.shape) + len(name)
        return whole[tuple(map(slice, box.lo, box.hi))]

    mine = {name: shard(name, x).float() for name, x in src.items() if rank in x}
    for _ in range(2):  # the second call has nothing to plan
        moved = rv.redistribute_many(
            mine, src, dst, dst_dtype=torch.bfloat16, memory_limit=64 << 20
        )
    for name, layout in dst.items():
        if rank in layout:
            assert torch.equal(moved[name], shard(name, layout).bfloat16())
    dist.barrier()
    dist.destroy_process_group()
    print(f"rank {rank} of {n}: {len(src)} weights from {k} ranks to {n - k}: all right")


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--dry-run", action="store_true", help="print bytes, steps, time and memory")
parser.add_argument("--model", choices=sorted(SIZES), default="7b", help="default: 7b")
args = parser.parse_args()
if args.dry_run:
    dry_run(SIZES[args.model])
else:
    layers, hidden, intermediate, kv, vocab = SIZES[args.model]
    run((layers, hidden // 64, intermediate // 64, kv, vocab // 64))
