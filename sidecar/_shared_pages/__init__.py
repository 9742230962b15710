"""Small files in shared memory, by which engine cores and sidecars read each other's state."""
