"""Sequences, blocks and plans: decides what each step computes, and accounts for the cache. No model in here."""
