"""Models through the classes of transformers: forward passes, capabilities, compiled steps. Start with `runtime`."""
