"""What `tests/performance/peers.py` runs: one module for each engine, and the forms of the model that they read."""
