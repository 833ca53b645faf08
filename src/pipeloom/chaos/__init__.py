"""Fault campaigns of ``pipeloom chaos``: training runs that are hurt on purpose, and compared with a reference one.

campaign ──starts──> pipeloom train ──> ranks, each with an `Injector` behind its black box
   │                                       │ appends actions, phases, file operations and the strike
   │ <────────────── record ───────────────┘
   └── resumes the run as a user would, compares losses and checkpoints, looks for what is left behind
"""
