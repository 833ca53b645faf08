"""Stages that run a model's own forward, with the parts of other stages passed over.

stage           the stage, and the copy of the model's containers that its forward runs on
arguments       what a user passes, as the model's keyword arguments
forward_run     one forward: what arrives, what it finds out, and the message for the next stage
place           which parts a stage has, and where they stand in the model
stand_ins       modules in place of parts; other_parts: what parts of other stages return
decisions       what a forward reads of its inputs into Python, such as for a branch
origins         follows values through a forward, to find those that later stages need
attributes      what is set on the model's containers; containers: what parts leave in dicts and lists
collected       outputs that transformers collects by hooks; caches: keys and values of earlier tokens
draws           random numbers drawn between parts, alike on every stage
"""
