"""The sidecar's access to vLLM: the adapter, its connections, and the plugin inside vLLM."""
