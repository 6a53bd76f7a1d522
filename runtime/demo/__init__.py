"""The demo: SmolLM2-135M-Instruct fetched, exported to ONNX, converted and served; nothing is imported until used."""
