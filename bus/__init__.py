"""The bus: messages, protocol, runtime and command line."""
