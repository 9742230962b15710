"""The broker as a whole: its peers, its groups and its configuration."""
