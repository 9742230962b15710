"""The measurements of ``wavebus bench``, which users can repeat on their hosts."""
