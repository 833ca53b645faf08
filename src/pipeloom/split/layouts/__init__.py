"""Which modules of a model run one after another, as declared, registered or detected in its source; what is around."""
