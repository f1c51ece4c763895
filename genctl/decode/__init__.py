"""The decode core. Modules to start from: `types`, `loop`, `runtime`, `cache`, `processors`, `stopping`."""
