"""Data parallel ranks of the embedded engine: lockstep, waves, and pausing in two phases."""
