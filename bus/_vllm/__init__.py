"""What roles and broker know of vLLM: its payloads, its source, its versions, and seams in it."""
