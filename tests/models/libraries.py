"""The libraries of models; import them from here.

torchvision's compiled ops load beside a CUDA build of torch alone. ``timm`` and ``transformers``
import torchvision and call none of these ops, so a declaration of them suffices.
"""

import importlib.util
import os

import torch

if importlib.util.find_spec("torchvision") and not torch.cuda.is_available():
    for name in ("nms", "qnms"):
        torch.library.define(
            f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )
os.environ["HF_HUB_OFFLINE"] = "1"

import timm
import transformers

__all__ = ["timm", "transformers"]
