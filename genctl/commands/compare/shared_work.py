"""What decoding the runs of a comparison together saves."""

from __future__ import annotations

from dataclasses import dataclass, field

from genctl import events


@dataclass
class SharedWork:
    """Counts prefills and forward passes: what was spent, and what the lanes would take one by one.

    A listener of events; `expect` comes before those of a lane. `forwards` is counted by whoever runs the model.
    """

    forwards: int = 0  # that were run
    alone: int = 0  # that the texts would take one by one
    prefills: int = 0
    lanes: int = 0
    prefill_s: float = 0.0  # spent
    spared_s: float = 0.0  # that further prefills of the same prompts would take
    decode_s: float = 0.0
    _guided: dict[str, bool] = field(default_factory=dict)  # whether a lane reads a negative prompt, too
    _prompts: dict[str, str] = field(default_factory=dict)  # of each lane
    _shared: set[str] = field(default_factory=set)  # lanes that began from another lane's prefill
    _prefill_of: dict[str, float] = field(default_factory=dict)  # seconds, by prompt

    def expect(self, lane: str, prompt: str, *, guided: bool) -> None:
        """A lane of a prompt follows."""
        self._prompts[lane], self._guided[lane] = prompt, guided

    def feed(self, event: events.Event) -> None:
        """Take in one event."""
        if isinstance(event, events.Prefilled):
            prompt = self._prompts[event.lane]
            self.lanes += 1
            if event.shared:
                self._shared.add(event.lane)
                self.spared_s += self._prefill_of.get(prompt, 0.0)
            else:
                self.prefills += 1
                self.prefill_s += event.seconds
                self._prefill_of[prompt] = event.seconds
        elif isinstance(event, events.Finished):
            passes = event.forwards + (event.lane in self._shared)
            # a negative prompt is read once more at each step, by this lane alone
            self.alone += passes * (2 if self._guided[event.lane] else 1)

    def forget(self) -> None:
        """Forget the lanes: the next prompts follow."""
        for of_lanes in (self._guided, self._prompts, self._shared, self._prefill_of):
            of_lanes.clear()
