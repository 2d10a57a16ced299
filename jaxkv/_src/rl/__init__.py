"""Parts of losses for policies that rollouts train."""
