"""How many replicas of a model there should be, and of which kind, by what comes, what waits and what will come.

`desired` decides; `capacity` says what one replica bears, `forecast` what will come, `covering` which kinds are the
cheapest that do. Pure: whoever runs it (a tier, the simulator) tells it what is seen and carries out what it desires.
"""
