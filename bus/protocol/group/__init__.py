"""The machines of one group."""
