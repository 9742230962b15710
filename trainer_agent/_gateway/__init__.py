"""The gateway: serves vLLM's routes of one server for a whole group of engines."""
