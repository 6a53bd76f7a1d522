"""The OpenAI-compatible server: FastAPI over `AsyncLLM`."""
