"""The trainer's machines: an update, its chunks, and its pause."""
