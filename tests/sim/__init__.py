"""A whole group in simulated time: engines, trainers, a broker, and what must never happen."""
