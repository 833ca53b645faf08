"""The processes of a run.

launcher        starts the ranks of a run on this host, and ends them all when one fails
black_box       a page of memory with a rank's step, action and error, which outlives the rank
watchdog        ends the run when a rank hangs, and names it; hang_board, hang_report, waits: its parts
cluster_environment   this process as a rank of SLURM or Open MPI
rendezvous      how processes meet, also after torchrun has restarted them
network         how processes of several hosts reach each other
agreement       compares what processes are about to run
collectives     small collectives; also the end of gloo's threads
host_memory     whether freed host memory stays in the process, and errors about anonymous memory
"""
