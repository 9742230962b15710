"""Sockets, timers, and the loops of the broker and the peers."""
