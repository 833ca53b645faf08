"""The optimizer step without a barrier (Zero Bubble, arXiv:2401.10241, section 4).

step          `PostValidatedStep`
rank_update   the update of one rank, which can be undone
warm_up       forwards of the next step, which can be cancelled
"""
