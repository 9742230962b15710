"""vLLM's own trainer engines over the bus."""
