"""Runs a converted model: feeds of a plan, cache tensors, and the onnxruntime session."""
