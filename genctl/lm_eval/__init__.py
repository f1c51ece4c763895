"""A backend for lm-evaluation-harness: `genctl-lm-eval --model genctl …`; otherwise the same as `lm_eval`.

The harness (0.4.13) looks up models in its registry and reads no entry points: `register` adds genctl to it.
"""

from __future__ import annotations

from importlib import import_module


def register() -> None:
    """Add genctl to the models of lm_eval, for `lm_eval.simple_evaluate(model="genctl", …)`."""
    import_module("lm_eval.models")  # its own models: it would not load them once genctl is registered
    from lm_eval.api.registry import model_registry

    if "genctl" not in model_registry:
        model_registry.register("genctl", target="genctl.lm_eval.model:GenctlLM")
