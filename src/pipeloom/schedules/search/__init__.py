"""`search`: a schedule for given stages, links and memory, never worse than a named one."""
