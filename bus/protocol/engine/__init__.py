"""The sidecar's machines for one engine."""
