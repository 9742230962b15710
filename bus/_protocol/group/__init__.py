"""The state machines of one group."""
