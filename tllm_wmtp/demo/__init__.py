"""The demonstration: a small language, and checkpoints trained on it."""

from pathlib import Path

#: The shipped checkpoints, Hugging Face directories: Gated DeltaNet layers (Qwen3.5), and Mamba2
#: layers (Nemotron-H).
CHECKPOINT = Path(__file__).parent / "checkpoint"
CHECKPOINT_MAMBA2 = Path(__file__).parent / "checkpoint_mamba2"


def model_name(directory: Path) -> str:
    """What results call a checkpoint: ``demo`` or ``demo-mamba2`` where it is a shipped one, else
    the name of its directory."""
    shipped = {CHECKPOINT: "demo", CHECKPOINT_MAMBA2: "demo-mamba2"}
    return shipped.get(directory, directory.resolve().name)
