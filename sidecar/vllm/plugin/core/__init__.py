"""What runs inside vLLM's engine cores."""
