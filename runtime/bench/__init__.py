"""`pagegraft bench`: workloads, measurement, and the static-batch baseline on the unconverted model."""
