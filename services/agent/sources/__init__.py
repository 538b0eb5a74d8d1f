"""Where an agent's servers come from besides its own list: DNS, Docker's labels, Kubernetes' EndpointSlices.

A source only says which servers there should be. Whether one is there, and in which state, is found out by looking at
it, as for those of the list. A source that is away changes nothing: what it said last goes on holding.
"""
