"""The part of the plugin that runs inside vLLM's workers, and loads their weights."""
