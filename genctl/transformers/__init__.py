"""Models through the classes of transformers: their passes, what each can do, compiled steps. Enter by `runtime`."""
