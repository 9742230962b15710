"""The engine's side of weight transfer, between the transport and the weights.

It receives chunks, verifies them, and decides whether memory allows staging. The receivers of the
transfer backends are in :mod:`bus.weight_transfer`.
"""
