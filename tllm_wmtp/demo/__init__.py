"""The demonstration: a small language, and checkpoints trained on it."""

from pathlib import Path

#: The shipped checkpoints, Hugging Face directories: Gated DeltaNet layers (Qwen3.5), and Mamba2
#: layers (Nemotron-H).
CHECKPOINT = Path(__file__).parent / "checkpoint"
CHECKPOINT_MAMBA2 = Path(__file__).parent / "checkpoint_mamba2"
