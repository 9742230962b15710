"""The sidecar's machines for one engine: its pause, memory, update and lease."""
