"""Offload: parameters, optimizer states and activations in host memory or on disk while they are not used.

store                 host memory or a file; mover has the threads that read and write it
activations           what forwards saved, moved by the OFFLOAD and RELOAD actions of a program
main_parameters       main parameters, read for gathers and updates
offloaded_optimizer   optimizer states, streamed through the update; offloaded_states has their layout
"""
