"""The trainer's state machines: an update, its chunks, and its pause."""
