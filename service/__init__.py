"""The host side: gRPC, text and the engine. Only `engine/executor.py` knows JAX."""
