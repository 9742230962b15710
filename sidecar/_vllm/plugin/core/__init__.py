"""The part of the plugin that runs inside vLLM's engine cores."""
