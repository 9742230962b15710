"""Checks manifests, loads updates into a worker's model, and holds staged weights."""
