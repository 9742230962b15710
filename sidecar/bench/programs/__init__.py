"""The programs of the benches' processes.

:meth:`sidecar.bench.harness.Bench.launch` starts each.
"""
