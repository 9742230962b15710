"""What needs GPUs: scripts, each with a table at its end; docs/gpu.md has what they printed."""
