"""Transfers tensors from trainer to engines: backend contracts, and wavebus's own backends.

Trainer and sidecar both import from here. This is the only package of the bus that imports torch.
It exports nothing itself, so that the rest of the bus can import
:mod:`~bus.weight_transfer.formats` and :mod:`~bus.weight_transfer.allocation` without torch. A
backend of your own needs :class:`bus.weight_transfer.base.Sender`,
:class:`bus.weight_transfer.base.Receiver` and :mod:`bus.weight_transfer.registry`.
"""
