"""Reinforcement learning of a small Llama: text by generate, its reward, and PPO steps on it.

    torchrun --nproc-per-node 2 examples/rollouts.py --plan megatron
    torchrun --nproc-per-node 4 examples/rollouts.py --plan hybrid:tp=2,microbatches=1,zero=1

Each round samples texts for a few prompts from the model as it is, under the plan that trains it.
A text's reward is its share of even tokens. Log-probabilities of the policy and of a reference come
from calls of the models without a loss; the loss is PPO's, with advantages within the texts of one
prompt and a penalty for leaving the reference.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import superscaler_core as ss

PROMPTS, TEXTS, PROMPT_LENGTH, LENGTH = 4, 4, 4, 12
CLIP, PENALTY = 0.2, 0.05


def log_probs(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities of the tokens behind the prompts, ``[texts, tokens]``."""
    found = logits[:, PROMPT_LENGTH - 1 : -1].log_softmax(-1)
    return found.gather(-1, ids[:, PROMPT_LENGTH:, None]).squeeze(-1)


class Policy(LlamaForCausalLM):
    """A Llama whose loss is PPO's where it gets advantages."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        advantages: Tensor | None = None,
        before: Tensor | None = None,
        reference: Tensor | None = None,
        **given: Any,
    ) -> Any:
        found = super().forward(input_ids=input_ids, **given)
        if advantages is None:
            return found
        now = log_probs(found.logits, input_ids)
        ratio = (now - before).exp()
        gain = torch.minimum(
            ratio * advantages[:, None],
            ratio.clamp(1 - CLIP, 1 + CLIP) * advantages[:, None],
        )
        # An estimate of the divergence that is never negative (Schulman, 2020).
        away = (reference - now).exp() - (reference - now) - 1
        return {"loss": (PENALTY * away - gain).mean()}


def new_model() -> Policy:
    """A small model with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, use_cache=False,
        bos_token_id=0, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return Policy(config).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plan", default="megatron", help="any text of parallelize")
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()

    num = PROMPTS * TEXTS
    numbers = torch.zeros(num, LENGTH)
    example = {
        "input_ids": torch.zeros(num, PROMPT_LENGTH + LENGTH, dtype=torch.long),
        "advantages": numbers[:, 0], "before": numbers, "reference": numbers,
    }  # fmt: skip
    policy = ss.parallelize(new_model(), kwargs=example, plan=args.plan)
    reference = ss.parallelize(new_model(), kwargs=example, plan=args.plan)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3, weight_decay=0.0)
    torch.manual_seed(1)  # The same on all ranks, which sample the same texts.
    rewards = []
    for number in range(args.rounds):
        prompts = torch.randint(1, 32, (PROMPTS, PROMPT_LENGTH)).repeat_interleave(TEXTS, 0)
        ids = policy.generate(
            input_ids=prompts, attention_mask=torch.ones_like(prompts), do_sample=True,
            max_new_tokens=LENGTH,
        )  # fmt: skip
        reward = (ids[:, PROMPT_LENGTH:] % 2 == 0).float().mean(1)
        of_prompt = reward.view(PROMPTS, TEXTS)
        spread = of_prompt.std(1, keepdim=True) + 1e-2
        advantages = (of_prompt - of_prompt.mean(1, keepdim=True)) / spread
        batch = {
            "input_ids": ids,
            "advantages": advantages.flatten(),
            "before": log_probs(policy(input_ids=ids).logits, ids),
            "reference": log_probs(reference(input_ids=ids).logits, ids),
        }
        for _ in range(3):
            loss = policy.step(**batch)
            policy.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        rewards.append(reward.mean().item())
        if policy.trainer.rank == 0:
            print(f"round {number}: reward {rewards[-1]:.3f}, loss {loss.item():.4f}", flush=True)
    assert sum(rewards[-2:]) > sum(rewards[:2]), "the model has learned what is rewarded"
    print(f"rank {policy.trainer.rank}: all right", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
