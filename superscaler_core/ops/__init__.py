"""Functions that generated code calls, beside those of torch: exact on any part of an op."""

from superscaler_core.ops.attention import attention
from superscaler_core.ops.experts import call_experts, call_listed
from superscaler_core.ops.image import avg_pool, conv, max_pool
from superscaler_core.ops.join import join
from superscaler_core.ops.lookup import embedding, embedding_bag
from superscaler_core.ops.loss import count_labels, cross_entropy, mean_of_labels, nll_loss
from superscaler_core.ops.modules import call_module
from superscaler_core.ops.norm import batch_norm
from superscaler_core.ops.pieces import linear_of_pieces, matmul_of_pieces
from superscaler_core.ops.random import dropout, mix, normal, uniform, uniform_bits
from superscaler_core.ops.samples import (
    binomial,
    integers,
    multinomial,
    permutation,
    poisson,
    standard_gamma,
)

__all__ = [
    "attention",
    "avg_pool",
    "batch_norm",
    "binomial",
    "call_experts",
    "call_listed",
    "call_module",
    "conv",
    "count_labels",
    "cross_entropy",
    "dropout",
    "embedding",
    "embedding_bag",
    "integers",
    "join",
    "linear_of_pieces",
    "matmul_of_pieces",
    "max_pool",
    "mean_of_labels",
    "mix",
    "multinomial",
    "nll_loss",
    "normal",
    "permutation",
    "poisson",
    "standard_gamma",
    "uniform",
    "uniform_bits",
]
