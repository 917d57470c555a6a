"""What a cache does to answers: log-probabilities of continuations, and lm-evaluation-harness with any cache."""
