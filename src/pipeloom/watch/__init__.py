"""A page in the browser that shows a run while it trains: its report so far, and what each process does now.

rank_states     what the ranks of a run do now
run_view        the page and its changes, from the files of the run and the black boxes of its processes
server          serves them on the loopback interface to whoever has the address
"""
