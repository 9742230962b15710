"""A self-contained toy learner: a small Qwen3 policy taught a cipher by asynchronous GRPO."""
