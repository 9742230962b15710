"""The state machines of data-parallel waves, and the health of DP groups."""
