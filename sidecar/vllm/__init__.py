"""Drives vLLM: the adapter, its connections, and the plugin inside vLLM's processes."""
