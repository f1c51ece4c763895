"""The decode core. Modules to start from: `types`, `loop`, `forward`, `cache`, `processors`, `stopping`."""
