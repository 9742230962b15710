"""Starts engines and their sidecars as processes, restarts them, and ends them completely."""
