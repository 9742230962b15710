"""The commands of the bus itself, one module each."""
