"""A self-contained toy learner: a small Qwen3 policy taught to sort by asynchronous GRPO."""
