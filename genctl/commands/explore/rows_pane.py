"""What the panes share: rows of which only those in view are drawn, one of them kept in view."""

from __future__ import annotations

from textual.geometry import Region, Size
from textual.scroll_view import ScrollView


class RowsPane(ScrollView, can_focus=True, inherit_bindings=False):
    """A pane of many rows. Keys come from the application, not from the widget."""

    drawn = 0  # rows that were drawn, for tests of the work done

    @property
    def room(self) -> Size:
        """The cells for rows, without the scrollbar."""
        return self.scrollable_content_region.size

    def measure(self, rows: int) -> None:
        """Say how many rows there are."""
        size = Size(self.room.width, max(rows, 1))
        if size != self.virtual_size:
            self.virtual_size = size

    def keep_in_view(self, row: int, rows: int = 1) -> None:
        """Scroll as little as needed to show these rows."""
        height = max(self.room.height, 1)
        if row < self.scroll_offset.y:
            self.scroll_to(y=row, animate=False)
        elif row + rows > self.scroll_offset.y + height:
            self.scroll_to(y=row + rows - height, animate=False)

    def redraw(self, first: int, end: int) -> None:
        """Draw rows again, as far as they are in view."""
        whole = Region(0, 0, *self.size)
        region = Region(0, first - self.scroll_offset.y, max(self.size.width, 1), end - first).intersection(whole)
        if region:
            self.refresh(region)
