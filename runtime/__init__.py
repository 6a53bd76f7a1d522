"""Runs converted models: block pool, block tables, continuous batching, sampling, streaming, server."""
