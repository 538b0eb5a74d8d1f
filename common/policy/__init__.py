"""Pure decisions: which endpoint takes a request, and what is learned from how it went.

Standard library only; nothing here awaits, reads a clock, draws from a global random source or logs. `now` (monotonic
seconds) and `rng` come in as arguments, so a service and the simulator run the very same objects.
"""
