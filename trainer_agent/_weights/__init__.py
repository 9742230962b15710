"""Sources of weights, and copies of weights in memory."""
