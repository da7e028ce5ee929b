"""Asynchronous pipelines: updates between microbatches instead of a flush after every step.

A step of such a plan is a run of the pipeline from fill to drain. ``Trainer.update_with`` tells it
how to make its optimizers. A weight that several stages read, such as that of tied embeddings, has
the versions and the delay of the first of these stages (docs/asynchronous.md).
"""

from __future__ import annotations

from superscaler_core.plans import Pipeline, plan_row

_other_results = plan_row(is_proposed=False)

pipedream = _other_results(
    Pipeline(
        "pipedream",
        "One stage per group of devices, which stashes the weight versions that are still read. "
        "Memory per group: 1/pp of the weights, in pp - s versions on stage s (in pp versions if "
        "vertical); activations of pp - s microbatches. Source: Narayanan et al., PipeDream, SOSP "
        "2019.",
        microbatches=16,
    )
)
pipedream_2bw = _other_results(
    Pipeline(
        "pipedream-2bw",
        "Like pipedream, with two versions on all stages; gradients are one update late. Source: "
        "Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training, ICML 2021.",
        microbatches=16,
    )
)
ampnet = _other_results(
    Pipeline(
        "ampnet",
        "Like pipedream, with only the newest version of weights, which backwards read, too. "
        "Source: Gaunt et al., AMPNet, 2017.",
        microbatches=16,
    )
)
pipemare = _other_results(
    Pipeline(
        "pipemare",
        "Like ampnet, with 2 (pp - 1 - s) + 1 microbatches in flight on stage s; PipeMare has the "
        "corrections for the delay. Source: Yang et al., PipeMare, MLSys 2021.",
        microbatches=16,
    )
)
