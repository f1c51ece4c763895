"""One run of several processes (`torchrun`): tensor parallelism."""
