"""Checkpoints: conversion between forms and layouts in bounded memory (docs/checkpoints.md)."""

from rvdcomm.checkpoint.catalog import open_checkpoint
from rvdcomm.checkpoint.engine import ReshardReport, reshard
from rvdcomm.checkpoint.load import load_shards
from rvdcomm.checkpoint.manifest import Manifest
from rvdcomm.checkpoint.plan import ReshardPlan, plan_reshard
from rvdcomm.checkpoint.rules import Rules
from rvdcomm.checkpoint.shards import commit_shards, save_shards
from rvdcomm.checkpoint.steps import Concat, Crop, Pad, Split, Stack, Transpose, Unstack

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
    "Transpose",
    "Unstack",
    "commit_shards",
    "load_shards",
    "open_checkpoint",
    "plan_reshard",
    "reshard",
    "save_shards",
]
