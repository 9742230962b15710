"""Staged updates inside a worker, and the staging channel through which the sidecar calls them."""
