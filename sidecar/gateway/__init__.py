"""The bus as the coordinator of one DP group, in a small process of its own.

It stands where vLLM's ``DPCoordinator`` does, and speaks its frames: see
:mod:`sidecar.gateway.frames` for those, :mod:`sidecar.gateway.server` for the process,
:mod:`bus.protocol.dp.coordinator` for what it decides. Started by the plugin inside vLLM or by
the embedded engine, as ``python -m sidecar.gateway``; imports neither vllm nor torch.
"""
