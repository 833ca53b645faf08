"""Rules for the options of a run, each with a message ``option=value: rule. Fix.`` on one line. No torch.

settings     all of them, in order
streams      asynchronous schedules
faults       lost ranks, spikes, values that are not finite
unused       options without effect
"""
