"""What every machine uses."""
