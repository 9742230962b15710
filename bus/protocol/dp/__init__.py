"""Data-parallel waves."""
