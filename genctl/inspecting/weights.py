"""How large a model is in memory, as the other rooms may ask for it."""

from genctl.models.packing import weights_bytes

__all__ = ["weights_bytes"]
