"""Losses for training a policy on its own samples.

These small functions compose like those of optax, without a trainer. They take
arrays [Q, T] from `jaxkv.rollout.generated`, Q sequences of T tokens, or arrays
[N, G, R] from `jaxkv.rollout.grouped`, G samples of R tokens for each of N
prompts.

  out = rollout.generated(state)
  advantages = rl.group_normalized(rewards, num_samples=8)

  def loss(params):
    # Without a cache, at the temperature of the rollout (1 for greedy).
    logits = forward(params, out.tokens, out.positions) / temperature
    log_probs = -optax.softmax_cross_entropy_with_integer_labels(
      logits[:, :-1], out.tokens[:, 1:]
    )
    return rl.grpo_loss(
      log_probs, out.log_probs[:, 1:], advantages, out.mask[:, 1:]
    )

The same loss, with each prompt computed once per group:

  out = rollout.grouped(rollout.generated(state))
  advantages = advantages.reshape(out.mask.shape[:2])

  def loss(params):
    log_probs = models.grouped_log_probs(
      params, out.prompts, out.prompt_lengths, out.completions,
      out.completion_lengths, config=config, temperature=temperature,
    )
    return rl.grpo_loss(log_probs, out.log_probs, advantages, out.mask)

The new and the old log-probs of a ratio must be of the same distribution, here
the softmax over all tokens at one temperature. A rollout returns `log_probs` of
the distribution that tokens were drawn from, after all changes by `Sampling`
and `process`. So `out.log_probs` are valid as the old log-probs only if the
temperature is the only change. With top-k, top-p, min-p, penalties, biases or
masks, compute the old log-probs with `rollout.score(temperature=)` or, before
the update, with `grouped_log_probs`. Two records of `RolloutConfig` are also
valid: `raw_log_probs` at temperature 1, and `unfiltered_log_probs` without
penalties, biases or masks.

| function             | computes                                              |
|----------------------|-------------------------------------------------------|
| `group_normalized`   | advantages of GRPO and Dr. GRPO                       |
| `leave_one_out`      | advantages of RLOO                                    |
| `importance_weights` | truncated weights of tokens drawn by an older policy  |
| `kl`                 | divergence from another policy: k1, k2, k3            |
| `grpo_loss`          | the clipped loss                                      |
"""

from jaxkv._src.rl.advantages import group_normalized
from jaxkv._src.rl.advantages import leave_one_out
from jaxkv._src.rl.divergence import kl
from jaxkv._src.rl.grpo import grpo_loss
from jaxkv._src.rl.importance_weights import importance_weights

__all__ = [
  "group_normalized",
  "grpo_loss",
  "importance_weights",
  "kl",
  "leave_one_out",
]
