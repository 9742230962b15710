"""Staged updates inside a worker, and the channel by which the sidecar reaches it."""
