"""Starts, guards and restarts the processes of engines."""
