"""Servers in front of the embedded runtime."""
