"""Recovery of a run whose rank was killed: the launcher starts that rank again, the others keep their processes.

    launcher                               rank 0, rank 1                    rank 2
       │                                      │ steps                          ✗ killed
       │ ── lost: rank 2 was killed ────────▶ │ PeerLost: leave the groups
       │ ── has it forked ───────────────────────────────────────────────────▶ rank 2
       │ ◀── ready, in the black box ──────── │ ◀───────────────────────────── │
       │ ── go: a new meeting place ────────▶ │ ─────────────────────────────▶ │
                                              └────────── meet again ──────────┘

The launcher also holds the anonymous memory into which each rank copies its state (`train/recovery/state_copies.py`),
so that the copies outlive the rank. Therefore a rank that is not ready in time, or fails on the way, can be killed and
started again too. No torch.
"""
