"""Staged updates inside a vLLM worker, and the channel by which the sidecar requests them."""
