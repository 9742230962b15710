"""One module per command of the bus itself."""
