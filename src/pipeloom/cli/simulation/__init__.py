"""Options, inputs and model of `pipeloom simulate`."""
