"""Stages that run a model's own forward, with the parts of other stages passed over.

stage           the stage, and what it learns from its first forward
model_copy      the copy of the model's containers, inside which the forward runs
arguments       what a user passes, as the model's keyword arguments
forward         one forward: what arrives, what it finds out, and the message for the next stage
place           which parts a stage has, and where they stand in the model
stand_ins       modules in place of parts; module_copies: copies of modules without their memory
tracking        follows values, branches and random numbers through a forward that is not known yet
attributes      what is set on the model's containers; containers: values in dicts and lists, and zeros
collected       outputs that transformers collects by hooks; caches: keys and values of earlier tokens
"""
