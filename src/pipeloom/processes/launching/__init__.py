"""Parts of the launcher: how ranks start, stop and end. No torch."""
