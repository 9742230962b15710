"""Manifests, copy plans, and the memory in which updates are staged."""
