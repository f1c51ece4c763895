"""Speed and memory of genctl beside its peers; `scripts/bench.py` is the door."""
