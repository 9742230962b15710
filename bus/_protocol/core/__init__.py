"""Parts that all state machines use."""
