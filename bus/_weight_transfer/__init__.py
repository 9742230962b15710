"""Transfers tensors from trainer to engines: backend contracts, and wavebus's own backends.

Trainer and sidecar both import from here. This is the only package of the bus that imports torch.
It exports nothing itself, so that the rest of the bus can import
:mod:`~bus._weight_transfer.formats` and :mod:`~bus._weight_transfer.allocation` without torch. A
backend of your own needs :class:`bus._weight_transfer.base.Sender`,
:class:`bus._weight_transfer.base.Receiver` and :mod:`bus._weight_transfer.registry`.
"""
