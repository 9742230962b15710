"""Manifests, copy plans, and the memory that updates are staged in."""
