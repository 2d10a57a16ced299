"""What a loss is made of when the policy is trained on its own answers.

Small functions, to be composed like those of optax; no trainer. They take what
`jaxkv.rollout.generated` gives: arrays [Q, T] with what is said of a token in
the token's column. Or [N, G, R] for G samples of N prompts, of `grouped`.

  out = rollout.generated(state)
  good = rl.group_normalized(rewards, num_samples=8)

  def loss(params):
    # Without a cache, at the temperature of the rollout; for 0, at 1.
    logits = forward(params, out.tokens, out.positions) / temperature
    log_probs = -optax.softmax_cross_entropy_with_integer_labels(
      logits[:, :-1], out.tokens[:, 1:]
    )
    return rl.grpo_loss(
      log_probs, out.log_probs[:, 1:], good, out.mask[:, 1:]
    )

The same with each prompt computed once:

  out = rollout.grouped(
    rollout.generated(state), num_samples=8, prompt_columns=P,
    completion_columns=R,
  )
  good = good.reshape(out.mask.shape[:2])

  def loss(params):
    log_probs = models.grouped_log_probs(
      params, out.prompts, out.prompt_lengths, out.completions,
      out.completion_lengths, config=config, temperature=temperature,
    )
    return rl.grpo_loss(log_probs, out.log_probs, good, out.mask)

A ratio compares two numbers of one distribution, here that of all tokens at a
temperature, so `old` must be of it, too. `log_probs` of a rollout are of the
distribution that tokens were drawn from, after all that `Sampling` and
`process` change. They fit if that is one temperature alone. With top-k, top-p,
min-p, penalties, biases or masks take `old` from `rollout.score(temperature=)`
or, before the update, from `grouped_log_probs`; at temperature 1 it is also
`records.raw_log_probs`, which `RolloutConfig(raw_log_probs=True)` keeps.

| function             | what                                                  |
|----------------------|-------------------------------------------------------|
| `group_normalized`   | advantages of GRPO and Dr. GRPO                       |
| `leave_one_out`      | advantages of RLOO                                    |
| `importance_weights` | truncated weights of tokens drawn by an older policy  |
| `kl`                 | divergence from another policy: k1, k2, k3            |
| `grpo_loss`          | the clipped loss                                      |
"""

from jaxkv._src.rl.advantages import group_normalized
from jaxkv._src.rl.advantages import leave_one_out
from jaxkv._src.rl.grpo import GrpoMetrics
from jaxkv._src.rl.grpo import grpo_loss
from jaxkv._src.rl.ratios import importance_weights
from jaxkv._src.rl.ratios import kl

__all__ = [
  "GrpoMetrics",
  "group_normalized",
  "grpo_loss",
  "importance_weights",
  "kl",
  "leave_one_out",
]
