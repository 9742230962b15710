"""Measurements that a user can repeat: ``wavebus bench``."""
