"""Routes of the front besides those of generation: what engines answer, alone or together."""
