"""The sidecar's state machines for one engine: its pause, memory, update and lease."""
