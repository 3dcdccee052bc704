"""Reinforcement learning with routing replay: record the experts when sampling, and train with the same ones.

    python examples/routing_replay.py

The program that samples and the one that trains round differently. If two experts of a token are nearly tied, rounding
alone can choose another expert in training. Then the token's log-probability differs, and the ratio in the policy
gradient is not one even before the first update. Here the sampler's routers differ from the trainer's by a millionth,
like another program's. Every expert starts with a twin that nearly ties with it, and choosing three experts per token
always splits a pair. So a small model shows in a few tokens what a large one shows in many.

The policy learns to write letters of the first half of its alphabet.

B sequences · S tokens each · N new tokens · L MoE layers · K experts per token
"""

from __future__ import annotations

import argparse
import copy
from typing import NamedTuple

import torch
from torch import Tensor

import tilemoe
from tilemoe.layers.attention import KVCache

LETTERS, B, N = 26, 32, 12


class Rollout(NamedTuple):
    """tokens (B, 1 + N), of which the first is the prompt · log_probs (B, N) · expert_ids (L, B, N, K)"""

    tokens: Tensor
    log_probs: Tensor
    expert_ids: Tensor


class Step(NamedTuple):
    """reward: the mean reward · replayed, free: the largest difference between a log-probability of the sampler and of
    the trainer before its update, with the recorded experts and with experts that the trainer chooses itself.
    """

    reward: float
    replayed: float
    free: float


def make_policy() -> tilemoe.DecoderLM:
    moe = tilemoe.MoEConfig(32, 16, num_experts=8, num_experts_per_tok=3, initializer_range=0.2)
    sizes = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "max_seq_len": 1 + N}
    policy = tilemoe.DecoderLM(tilemoe.ModelConfig(LETTERS, 32, moe=moe, initializer_range=0.2, **sizes))
    with torch.no_grad():
        for block in policy.blocks:
            weight = block.mlp.router.weight
            weight[1::2] = weight[::2] * (1 + 1e-6 * torch.randn_like(weight[::2]))
    policy.set_checkpointing("block")  # the recomputed forward replays, too
    return policy


def sampler_of(policy: tilemoe.DecoderLM) -> tilemoe.DecoderLM:
    sampler = copy.deepcopy(policy)
    with torch.no_grad():
        for block in sampler.blocks:
            weight = block.mlp.router.weight
            weight.mul_(1 + 1e-6 * torch.randn_like(weight))
    return sampler.eval()


@torch.no_grad()
def sample(model: tilemoe.DecoderLM) -> Rollout:
    """Sample one token at a time, with a key-value cache."""
    cache, record = KVCache(model.config.num_layers, N), tilemoe.RoutingRecord()
    tokens, log_probs = [torch.randint(LETTERS, (B, 1))], []
    for _ in range(N):
        each = model.next_logits(tokens[-1], cache, record).log_softmax(-1)
        tokens.append(torch.multinomial(each.exp(), 1))
        log_probs.append(each.gather(1, tokens[-1]))
    return Rollout(torch.cat(tokens, dim=1), torch.cat(log_probs, dim=1), record.expert_ids(B))


def log_probs_of(model: tilemoe.DecoderLM, tokens: Tensor, expert_ids: Tensor | None) -> Tensor:
    """The log-probabilities (B, N) of the tokens after the first, in one forward."""
    logits = model(tokens[:, :-1], expert_ids=expert_ids).logits
    return logits.log_softmax(-1).gather(2, tokens[:, 1:, None]).squeeze(2)


def main(arguments: list[str] | None = None) -> list[Step]:
    parser = argparse.ArgumentParser(description="Train a policy with routing replay.")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    policy = make_policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    steps = []
    for number in range(options.steps):
        rollout = sample(sampler_of(policy))
        with torch.no_grad():
            free = log_probs_of(policy, rollout.tokens, None)
        log_probs = log_probs_of(policy, rollout.tokens, rollout.expert_ids)
        rewards = (rollout.tokens[:, 1:] < LETTERS // 2).float()
        ratio = (log_probs - rollout.log_probs).exp()
        loss = -(ratio * (rewards - rewards.mean())).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        differences = [float((each.detach() - rollout.log_probs).abs().max()) for each in (log_probs, free)]
        steps.append(Step(float(rewards.mean()), *differences))
        if number % 5 == 0 or number == options.steps - 1:
            reward, replayed, chosen = steps[-1]
            print(f"step {number:3}  reward {reward:.2f}  log-probabilities off by {replayed:.1e}, free {chosen:.1e}")
    return steps


if __name__ == "__main__":
    main()
