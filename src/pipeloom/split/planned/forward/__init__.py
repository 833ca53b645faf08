"""One forward of a planned stage: what happens where the model calls its parts, and those of other stages.

forward_run     a known forward: what arrives, and the message for the next stage
exploration     the first forward of a form of inputs, which finds what later stages need
known           what explorations have found
other_parts     what parts of other stages return; other_modules: modules that are no parts, or inside of parts
"""
