"""Pages in shared memory between engine cores and sidecars."""
