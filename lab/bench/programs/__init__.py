"""The programs that a bench's processes run.

:meth:`lab.bench.harness.Bench.launch` starts each of them.
"""
