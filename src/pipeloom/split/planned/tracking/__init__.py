"""What a planned stage follows through a forward that it does not know yet.

origins      the values that later stages need
decisions    what the forward reads of its inputs into Python, such as for a branch
memory       results that a part has changed in place
forms        of what parts return: structure, shapes and dtypes, which stages send on
draws        random numbers drawn between parts, alike on every stage
types        notices a forward that asks for the type of a layer
"""
