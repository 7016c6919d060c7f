"""The `config.json` of models: three from the documentation, and a small one."""

import json
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).parents[2] / "docs" / "configs"
SMALL = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def config(name: str) -> dict[str, Any]:
    """Return the config of a model."""
    return json.loads((CONFIGS / f"{name}.json").read_text("utf-8"))
