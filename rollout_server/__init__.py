"""The rollout server: watches the exchange, verifies, hot-reloads vLLM, labels every answer."""
