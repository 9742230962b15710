"""The coordinator of one DP group, in a small process of its own.

A coordinator starts and numbers the waves of a DP group. The process takes the place of vLLM's
``DPCoordinator`` and sends and receives the same frames. :mod:`sidecar._dp_coordinator.frames`
encodes and decodes them, :mod:`sidecar._dp_coordinator.server` sends and receives them, and
:mod:`bus._protocol.dp.coordinator` decides. The plugin inside vLLM, or the embedded engine, starts
the process as ``python -m sidecar._dp_coordinator``. It imports neither vllm nor torch.
"""
