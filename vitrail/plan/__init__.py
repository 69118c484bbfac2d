"""What a run needs, before it is started: parameters, compute, memory, time, energy and price."""
