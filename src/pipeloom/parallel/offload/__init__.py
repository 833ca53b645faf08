"""Offload: what a rank needs later, in another memory meanwhile.

options        where, as words: "cpu", "disk:PATH"; no torch
store          memory of the host, or a file
optimizer      states of an optimizer, streamed through the update
               (parameters themselves: `pipeloom.parallel.offload.main_parameters`)
activations    what forwards saved, moved by the OFFLOAD and RELOAD actions of a program
"""
