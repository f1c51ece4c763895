"""The core: how tokens are written. Enter by file: `types`, `loop`, `forward`, `cache`, `processors`, `stopping`."""
