"""Sources that address pages of a pool inside their graph: spelled as contiguous caches, and run as they are."""
