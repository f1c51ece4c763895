"""Models through the classes of transformers: forward passes, abilities, compiled steps. Start with `runtime`."""
