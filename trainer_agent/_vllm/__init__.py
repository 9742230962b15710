"""Runs vLLM's own trainer engines over the bus: their client, source, patches and init info."""
