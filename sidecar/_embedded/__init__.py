"""The embedded engine: a small real inference engine in torch, for tests and the demo.

It needs no GPU and no vLLM, and receives updates over the bus as vLLM does.
"""
