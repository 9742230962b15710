"""The measurements of ``wavebus bench``, which a user can repeat."""
