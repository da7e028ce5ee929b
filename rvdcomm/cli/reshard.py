"""``rvdcomm reshard``: a checkpoint in other shards, layouts, dtypes, names or another form."""

from __future__ import annotations

import argparse

from rvdcomm.cli.arguments import parse_size
from rvdcomm.cli.command import OK, Command


def _reshard(args: argparse.Namespace) -> int:
    """Reshard a checkpoint, or print what that would do."""
    # Imported here because it imports torch, which other commands do not need.
    from rvdcomm.checkpoint import Rules, plan_reshard, reshard

    rules = Rules.load(args.rules) if args.rules else Rules()
    options = {
        name: value
        for name in (
            *("to", "dtype", "memory_limit", "max_file_bytes", "tensors_only", "index"),
            "follow_symlinks",
        )
        if (value := getattr(args, name)) is not None
    }
    if args.dry_run:
        print(plan_reshard(args.src_dir, rules, **options))
        return OK
    progress = not args.no_progress
    print(
        reshard(args.src_dir, args.dst_dir, rules, verify=args.verify, progress=progress, **options)
    )
    return OK


def _add_reshard(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("src_dir", metavar="SRC_DIR", help="the folder of the checkpoint")
    parser.add_argument(
        "dst_dir",
        metavar="DST_DIR",
        help="a folder that is new, empty, or left by the same command when it was interrupted",
    )
    parser.add_argument(
        "--rules", metavar="FILE", help="layouts and names, as .toml or .json (see below)"
    )
    parser.add_argument(
        "--to",
        choices=("sharded", "whole", "dcp"),
        help="sharded (default): safetensors files of each rank and a manifest; whole: as Hugging "
        "Face's; dcp: as torch.distributed.checkpoint's",
    )
    parser.add_argument(
        "--dtype", help="convert tensors of floats (float16 to float64) to this dtype"
    )
    parser.add_argument(
        "--memory-limit",
        metavar="BYTES",
        type=parse_size,
        help="most that buffers of tensors may take together (default 256MiB)",
    )
    parser.add_argument(
        "--max-file-bytes",
        metavar="BYTES",
        type=parse_size,
        help="most bytes of tensors in a file (default 5GB); after a crash, files that are "
        "complete are kept",
    )
    parser.add_argument(
        "--tensors-only",
        action="store_true",
        help="leave out what the result cannot hold: entries of a DCP source that are no tensors, "
        "tensors that the index of SRC_DIR does not name, and __metadata__ of safetensors with "
        "--to dcp or if files have different texts",
    )
    parser.add_argument(
        "--index",
        metavar="NAME",
        help="the index or safetensors file to read if SRC_DIR holds several checkpoints, such as "
        "model.safetensors.index.fp16.json (default: model.*, or the only one)",
    )
    parser.add_argument(
        "--follow-symlinks",
        action="store_true",
        help="also read files to which links lead out of SRC_DIR (links into the same repository "
        "of a Hugging Face cache are always followed)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print what would be read and written, and stop"
    )
    parser.add_argument(
        "--verify", action="store_true", help="read the result again and compare checksums"
    )
    parser.add_argument("--no-progress", action="store_true", help="show no progress bar")


COMMAND = Command(
    "write a checkpoint in other shards, layouts, dtypes, names or another form",
    """sources (recognized by the files in SRC_DIR):
  Hugging Face-style safetensors: one file, or several with their index; results of --to;
  shards of save_shards after commit_shards; checkpoints of torch.distributed.checkpoint, in
  .distcp or safetensors files. Nothing is unpickled. Incomplete checkpoints are refused.
  --to whole carries along config, tokenizer and other small files.
rules:
  ranks = "0:4"                          the ranks of the result; by default rank 0 alone
  [layouts]                              a glob on names = a layout; the first that matches counts
  "*.[qkv]_proj.weight" = "R(1)V(1)D(4,1)"
  "*.o_proj.weight" = "R(1)V(1)D(1,4)"   what no glob matches is on all ranks
  "*.experts.0.*" = "R(1)V(1)D(2,1) ranks(0:2) cuts(balanced)"
  [rename]                               regular expression = replacement, applied in this order;
                                         each has 20 seconds for all names
  '^model\\.' = ""
  tables that make tensors of others; * is any text, # a number, dim is 0 by default:
  [split]      "*.qkv.*" = {parts = ["*.q.*", "*.k.*", "*.v.*"], sizes = [4, 1, 1], groups = 8}
  [unstack]    "*.experts.up" = {parts = "*.experts.#.up", dim = 0}
  [transpose]  "*.c_attn.weight" = [1, 0]
  [crop]       "embed.weight" = {size = 50257}
  [pad]        "embed.weight" = {multiple = 128}
  [concat]     "*.gate_up" = {parts = ["*.gate", "*.up"]}
  [stack]      "*.experts.up" = {parts = "*.experts.#.up"}
  A glob or an expression that matches nothing is an error.
examples:
  Print the plan, then run it:
    rvdcomm reshard llama tp4 --rules tp4.toml --dry-run
    rvdcomm reshard llama tp4 --rules tp4.toml --dtype bfloat16 --verify
  Make Hugging Face-style files of the checkpoint of a training run:
    rvdcomm reshard step-9000 release --to whole --tensors-only
  After an interruption (a full disk, a crash), run the same command again; it resumes.
""",
    _add_reshard,
    _reshard,
)
