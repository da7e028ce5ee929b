"""Train a small policy by a plan, update vLLM after each step, and let it generate.

    torchrun --nproc-per-node 2 examples/vllm_rollouts.py --plan zero3

Rank 0 has the engine, in processes of its own. Texts for a few prompts come from vLLM; their reward
is their share of even tokens, and the policy learns it by the policy gradient. The log-probability
that vLLM gives to the tokens that it chose is compared with the policy's: after an update they are
equal, up to rounding. Needs vLLM 0.32 (docs/weight-sync.md).
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import superscaler_core as ss
from rvdcomm.interop.vllm import LocalClient, Sender

PROMPTS, TEXTS, PROMPT_LENGTH, LENGTH = 4, 4, 4, 12


def log_probs(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities of the tokens behind the prompts, ``[texts, tokens]``."""
    found = logits[:, PROMPT_LENGTH - 1 : -1].log_softmax(-1)
    return found.gather(-1, ids[:, PROMPT_LENGTH:, None]).squeeze(-1)


class Policy(LlamaForCausalLM):
    """A Llama whose loss is that of the policy gradient where it gets advantages."""

    def forward(
        self, input_ids: Tensor | None = None, advantages: Tensor | None = None, **given: Any
    ) -> Any:
        found = super().forward(input_ids=input_ids, **given)
        if advantages is None:
            return found
        return {"loss": -(log_probs(found.logits, input_ids) * advantages[:, None]).mean()}


def new_model() -> Policy:
    """A small model with random weights; vLLM's CPU kernels want heads of 32."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, use_cache=False,
        bos_token_id=0, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return Policy(config).eval()


def engine(folder: str) -> Any:
    """An engine of vLLM that serves the first weights."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    return LLM(
        folder,
        dtype="float32",
        hf_overrides={"architectures": ["LlamaForCausalLM"]},  # And not Policy.
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=64,
        weight_transfer_config=WeightTransferConfig(backend="rvd"),
    )


def sampled(llm: Any, number: int) -> tuple[Tensor, Tensor]:
    """Prompts with their texts, and the log-probabilities of the texts' tokens."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    generator = torch.Generator().manual_seed(number)
    prompts = torch.randint(1, 32, (PROMPTS, PROMPT_LENGTH), generator=generator)
    prompts = prompts.repeat_interleave(TEXTS, 0)
    params = SamplingParams(
        max_tokens=LENGTH, temperature=1.0, ignore_eos=True, detokenize=False, logprobs=0
    )
    found = llm.generate(
        [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts.tolist()],
        params,
        use_tqdm=False,
    )
    texts = torch.tensor([list(each.outputs[0].token_ids) for each in found])
    chosen = [
        [at[token].logprob for at, token in zip(out.logprobs, out.token_ids, strict=True)]
        for out in (each.outputs[0] for each in found)
    ]
    return torch.cat([prompts, texts], 1), torch.tensor(chosen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plan", default="zero3", help="any text of parallelize")
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, num = dist.get_rank(), PROMPTS * TEXTS
    example = {
        "input_ids": torch.zeros(num, PROMPT_LENGTH + LENGTH, dtype=torch.long),
        "advantages": torch.zeros(num),
    }
    policy = ss.parallelize(new_model(), kwargs=example, plan=args.plan)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2, weight_decay=0.0)
    llm = None
    if rank == 0:
        with tempfile.TemporaryDirectory() as text:
            new_model().save_pretrained(Path(text))
            llm = engine(text)
    client = LocalClient(llm) if llm is not None else None
    sender = Sender(policy.weight_shards, client, num_workers=1, proof=True)

    rewards = []
    for number in range(args.rounds):
        sender.send(f"step-{number}")
        given = [sampled(llm, number) if llm is not None else None]
        dist.broadcast_object_list(given, 0)
        assert given[0] is not None
        ids, chosen = given[0]
        away = (log_probs(policy(input_ids=ids).logits, ids) - chosen).abs().max().item()
        reward = (ids[:, PROMPT_LENGTH:] % 2 == 0).float().mean(1)
        of_prompt = reward.view(PROMPTS, TEXTS)
        advantages = (of_prompt - of_prompt.mean(1, keepdim=True)).flatten()
        policy.step(input_ids=ids, advantages=advantages)
        optimizer.step()
        optimizer.zero_grad()
        rewards.append(reward.mean().item())
        if rank == 0:
            print(f"step {number}: reward {rewards[-1]:.3f}, vLLM is {away:.1e} away", flush=True)
        assert away < 1e-4, "vLLM has the weights of the policy"
    assert sum(rewards[-3:]) > sum(rewards[:3]), "the policy has learned what is rewarded"
    sender.close()
    print(f"rank {rank}: all right", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
