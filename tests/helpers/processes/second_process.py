"""Call an exported model with JAX and NumPy alone: `second_process.py MODEL ARGUMENTS RESULT`."""

import json
import sys
from pathlib import Path


def main(root, arguments, result):
    sys.modules["tpu_embed"] = None  # any import of it fails
    import jax
    import numpy as np
    from jax import export

    metadata = json.loads((root / "metadata.json").read_text())
    tables = {
        name: {part: np.load(root / f["file"], mmap_mode="r") for part, f in table["files"].items()}
        for name, table in metadata["tables"].items()
    }
    program = export.deserialize(bytearray((root / "model.stablehlo").read_bytes()))
    given = np.load(arguments)
    features = {path: given[f"features {path}"] for path in metadata["features"]}
    weights = {p: given[f"weights {p}"] for p, f in metadata["features"].items() if f["weights"]}
    outputs = program.call(tables, features, weights, given["dense"])
    assert jax.device_count() == 1, "another process, other devices"
    np.savez(result, **outputs)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
