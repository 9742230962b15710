"""What runs inside vLLM's workers."""
