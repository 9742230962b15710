"""The state machines of the bus, without I/O or a clock."""
