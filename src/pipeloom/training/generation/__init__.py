"""Generation of tokens by the stages of a pipeline.

generate    the arguments of `Pipeline.generate`, and its result
decoding    one rank's part: forwards of its stages, token after token
sequences   the sequences of one micro-batch: inputs of the model, choice of tokens, caches of stages
sampling    random draws, and the filters of models that are not of transformers
"""
