"""Checkpoints: conversion between forms and layouts in bounded memory (docs/checkpoints.md)."""

from rvdcomm.checkpoint.catalog import open_checkpoint
from rvdcomm.checkpoint.engine import ReshardReport, reshard
from rvdcomm.checkpoint.load import load_shards
from rvdcomm.checkpoint.manifest import Manifest
from rvdcomm.checkpoint.plan import ReshardPlan, plan_reshard
from rvdcomm.checkpoint.reader import bytes_of
from rvdcomm.checkpoint.rules import Rules
from rvdcomm.checkpoint.safetensors_file import header_bytes
from rvdcomm.checkpoint.shards import commit_shards, save_shards
from rvdcomm.checkpoint.steps import Concat, Crop, Pad, Split, Stack, Transpose, Unstack
from rvdcomm.checkpoint.stored import StoredTensor
from rvdcomm.checkpoint.views import cropped

__all__ = [
    "Concat",
    "Crop",
    "Manifest",
    "Pad",
    "ReshardPlan",
    "ReshardReport",
    "Rules",
    "Split",
    "Stack",
    "StoredTensor",
    "Transpose",
    "Unstack",
    "bytes_of",
    "commit_shards",
    "cropped",
    "header_bytes",
    "load_shards",
    "open_checkpoint",
    "plan_reshard",
    "reshard",
    "save_shards",
]
