"""The trainer's side of an update: plan, transport, chunks, steps, and commit."""
