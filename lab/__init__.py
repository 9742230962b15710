"""Programs that try out and measure the whole: ``wavebus demo`` and ``wavebus bench``.

They may import all other packages. No other package imports this one.
"""
