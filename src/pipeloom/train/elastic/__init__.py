"""Elastic runs of `pipeloom train`: another layout when ranks are lost or come back, from the newest state."""
