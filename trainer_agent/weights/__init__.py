"""Sources of weights, and copies of them."""
