"""Long runs in bad conditions; short in `make test`, long in `make chaos`."""
