"""config.json of the paper's three models, as the pages show them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "docs/benchmarks/models"
MODELS: dict[str, dict[str, Any]] = {
    name: json.loads((FOLDER / name / "config.json").read_text(encoding="utf-8"))
    for name in ("q35", "q122", "nem")
}
