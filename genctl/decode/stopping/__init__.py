"""Why a row ends. `build` makes the criteria of a lane; `cut` trims a finished text; `HoldBack` trims a live one."""

from genctl.decode.stopping.build import NamedCriterion, StoppingContext, build, cut, visible
from genctl.decode.stopping.trim import HoldBack, trim

__all__ = ["HoldBack", "NamedCriterion", "StoppingContext", "build", "cut", "trim", "visible"]
