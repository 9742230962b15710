"""One update, from the plan of its chunks to the commit."""
