"""The programs that a bench's processes run.

:meth:`sidecar.bench.harness.Bench.launch` starts each of them.
"""
