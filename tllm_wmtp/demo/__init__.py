"""The demonstration: a small language, and a checkpoint trained on it."""

from pathlib import Path

#: The shipped checkpoint, a Hugging Face directory.
CHECKPOINT = Path(__file__).parent / "checkpoint"
