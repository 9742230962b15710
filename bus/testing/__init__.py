"""Simulated time and a network in memory, for tests of programs that use the bus."""
