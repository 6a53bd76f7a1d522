"""Rewrites every attention of an exported ONNX decoder into one PagedAttention node over packed tokens."""
