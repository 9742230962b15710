"""The broker as a whole: its peers and its groups."""
