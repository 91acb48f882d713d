"""The embedded runtime: requests in, speculative steps, tokens out."""
